"""A complete small server: it draws pictures with a model that streams, for many clients at once.

    python -m pip install 'streamflow-offload[serve]'
    cd examples
    python -m serve                                    # a tiny model that comes with streamflow and draws digits
    python -m serve --model FLUX.1-dev --device cuda   # the directory of a pipeline that diffusers saved
    python -m serve --loop trio                        # the same under Hypercorn on trio

    curl -s localhost:8000/v1/generations --json '{"prompt": "2026", "seed": 1}' -o digits.png
    curl -sN localhost:8000/v1/generations -H 'accept: text/event-stream' --json '{"prompt": "7", "request_id": "mine"}'
    curl -sX DELETE localhost:8000/v1/generations/mine

It has no authentication of its own and listens on the loopback interface unless it is told otherwise: put a proxy that
knows your clients in front of it.
"""
