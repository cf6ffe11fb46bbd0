"""The adapter that a service offers, as files of a run: two of them, of bounded size, and nothing else.

A signed URL is asked without any key. The config names the run's own base, and the layers that the weights have.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from pydantic_core import from_json

from msgrpo.errors import RunError, first_line
from msgrpo.files import PART, replace_bytes, replace_json
from msgrpo.models.headers import tensor_shapes
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, by_layer
from msgrpo.models.paths import absolute

LARGEST = 4 * 2**30  # bytes of an adapter
FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
READ_S = 60.0


def download(urls: Mapping[str, str], out: Path, base: str, service: str) -> None:
    """Write the adapter's config and weights into `out`. Raises RunError where they are not offered, or are none."""
    try:
        members = _members(urls, service)
        config = from_json(members[ADAPTER_CONFIG])
        if not isinstance(config, dict):
            raise ValueError(f"{ADAPTER_CONFIG} holds no JSON object")
        part = out / f".{ADAPTER_WEIGHTS}{PART}"
        replace_bytes(part, members[ADAPTER_WEIGHTS])
        try:
            layers = {layer.rpartition(".")[2] for layer in by_layer(tensor_shapes(part)) if layer}
            config |= {"base_model_name_or_path": absolute(base), "target_modules": sorted(layers)}  # some name none
            config |= {"task_type": "CAUSAL_LM", "inference_mode": True}
            replace_json(out / ADAPTER_CONFIG, config)
            part.replace(out / ADAPTER_WEIGHTS)
        finally:
            part.unlink(missing_ok=True)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, tarfile.TarError, EOFError, OSError) as error:
        raise RunError(f"the service's adapter cannot be taken over: {first_line(error)}") from error


def _members(urls: Mapping[str, str], service: str) -> dict[str, bytes]:
    """The two files, from their own URLs or out of one archive."""
    if "archive" not in urls:
        named = {Path(name).name: url for name, url in urls.items()}
        return {name: _body(named[name], service) for name in FILES}
    with tarfile.open(fileobj=io.BytesIO(_body(urls["archive"], service))) as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        data = {}
        for name in FILES:
            if members[name].size > LARGEST:
                raise ValueError(f"{name} has {members[name].size:,} bytes")
            file = archive.extractfile(members[name])
            data[name] = b"" if file is None else file.read()
        return data


def _body(url: str, service: str) -> bytes:
    """What lies at a signed URL, over https or at the service's own host; no redirect is followed."""
    if urlsplit(url).scheme != "https" and urlsplit(url).netloc != urlsplit(service).netloc:
        raise ValueError(f"it names {url[:100]!r}, which is neither https nor the service's own host")
    body = bytearray()
    with httpx.stream("GET", url, timeout=READ_S) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code} at {urlsplit(url).netloc}")
        for piece in response.iter_bytes():
            body += piece
            if len(body) > LARGEST:
                raise ValueError(f"the adapter is larger than {LARGEST // 2**30} GiB")
    return bytes(body)
