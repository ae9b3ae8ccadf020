"""Compare the bytes of a leased entry with its digests: every image, every header, and the padding between."""

from __future__ import annotations

from functools import partial

from streamflow.stages.errors import SourceReadError
from streamflow.stages.threads import ThreadCrew
from streamflow.store.damage import Damage, DamagedEntryError
from streamflow.store.hashing import Progress, hash_images
from streamflow.store.lease import Lease


async def verify_bytes(lease: Lease, crew: ThreadCrew, num_threads: int, progress: Progress | None) -> None:
    """Nothing, if every byte is as it was published. Cancellable between chunks.

    :raises DamagedEntryError: if one is not, or cannot be read.
    """
    try:
        await crew.call(partial(_check_files, lease), name="verifying")
        sizes = [image.place.nbytes for image in lease.manifest.images]
        digests = await hash_images(sizes, lease.fill, crew, num_threads, progress=progress)
    except SourceReadError as failure:
        raise DamagedEntryError(Damage.PAYLOAD, str(failure)) from failure
    for image, digest in zip(lease.manifest.images, digests, strict=True):
        if image.sha256 != digest:
            file = lease.manifest.files[image.place.file].name
            raise DamagedEntryError(
                Damage.PAYLOAD, f"image {image.image.name!r} in {file} has the digest {digest}, not {image.sha256}"
            )


def _check_files(lease: Lease) -> None:
    """Headers as the manifest implies, zeros between the images. With the images' digests, that is the whole file."""
    for number, file in enumerate(lease.plan.files):
        header = bytearray(len(file.header))
        lease.fill_from_file(number, memoryview(header), 0)
        if header != file.header:
            raise DamagedEntryError(Damage.HEADER, f"{file.name} has another header now")
        end = len(header)
        for image in file.images:
            place = lease.place(image)
            gap = bytearray(place.offset_bytes - end)
            lease.fill_from_file(number, memoryview(gap), end)
            if any(gap):
                raise DamagedEntryError(Damage.PADDING, f"{file.name} is not zero before offset {place.offset_bytes:,}")
            end = place.offset_bytes + place.nbytes
