"""Fixtures that every test may use."""

import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Examples read and write files: how long one takes says nothing on a busy machine.
settings.register_profile(
    "shardwright", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shardwright")

# Checkpoints written by other tools. They are too large for the repository and lie beside it.
GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden checkpoints; a test that asks for it is skipped where it is absent."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden checkpoints: {GOLDEN} does not exist")
    return GOLDEN


@pytest.fixture(scope="session")
def golden_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second golden set: experts, latent attention, pipeline layouts."""
    packed = GOLDEN.with_name("golden-moe.tar.xz")
    if not packed.is_file():
        pytest.skip(f"no golden checkpoints: {packed} does not exist")
    into = tmp_path_factory.mktemp("golden-moe")
    with tarfile.open(packed) as archive:
        archive.extractall(into, filter="data")
    return into / "golden-moe"
