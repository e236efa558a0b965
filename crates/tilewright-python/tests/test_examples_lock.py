"""The lock file of the Rust examples, which have a workspace of their own: nothing else that CI runs reads it."""

import pathlib

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python is older than 3.11")
ROOT = pathlib.Path(__file__).parents[3]


def stale_dependencies(lock: str, manifests: dict) -> list:
    """Crates and dependencies that the lock file and the crates' manifests do not share. Optional and development dependencies
    may be locked."""
    stale = []
    for package in tomllib.loads(lock)["package"]:
        name, manifest = package["name"], tomllib.loads(manifests.get(package["name"], ""))
        if not manifest or "source" in package:
            continue
        locked = {one.split()[0] for one in package.get("dependencies", ())}
        known = {one: options for kind in ("dev-dependencies", "dependencies") for one, options in manifest.get(kind, {}).items()}
        required = {one for one in manifest.get("dependencies", ()) if "optional" not in known[one]}
        stale += [(name, one) for one in sorted((required - locked) | (locked - known.keys()))]
    return stale


def test_examples_lock_the_dependencies_of_the_crates():
    lock = (ROOT / "examples/Cargo.lock").read_text(encoding="utf-8")
    manifests = {path.parent.name: path.read_text(encoding="utf-8") for path in ROOT.glob("crates/*/Cargo.toml")}
    assert stale_dependencies(lock, manifests) == []
    assert '\n "gemm-f32",\n' in lock
    planted = lock.replace('\n "gemm-f32",\n', '\n "gemm",\n')
    assert stale_dependencies(planted, manifests) == [("tilewright", "gemm"), ("tilewright", "gemm-f32")]
