"""The compiled kernels for the tests: built into a folder of their own, so that a test run leaves nothing behind."""

from __future__ import annotations

import pytest

from schedlab.kernels import native_library


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory):
    """The compiled kernels' folder, or a skip where there is no compiler."""
    folder = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "directory", lambda: folder)
        try:
            native_library.build()
        except native_library.BuildError as error:
            pytest.skip(f"no compiled kernels: {error}")
    return folder


@pytest.fixture(scope="module")
def native(native_folder):
    """The module of compiled kernels; an engine takes them by default in this module's tests, and in no other's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "directory", lambda: native_folder)
        native_library.load.cache_clear()
        native_library.load()
        from schedlab.kernels import native as module

        yield module
    native_library.load.cache_clear()
