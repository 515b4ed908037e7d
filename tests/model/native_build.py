"""The compiled kernels for the tests: built into a folder of their own, so that a test run leaves nothing behind."""

from __future__ import annotations

import pytest

from schedlab.kernels import native_library


@pytest.fixture(scope="session")
def native(tmp_path_factory):
    """The module of compiled kernels, or a skip where there is no compiler."""
    folder = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "directory", lambda: folder)
        native_library.load.cache_clear()
        try:
            native_library.build()
            native_library.load()
        except native_library.BuildError as error:
            pytest.skip(f"no compiled kernels: {error}")
        from schedlab.kernels import native as module

        yield module
    native_library.load.cache_clear()
