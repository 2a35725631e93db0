"""Runs Agent Lightning 0.3's own store server on loopback until its stdin ends.

Its store runs from its own files as they were released; what its packages import beside it (an LLM
gateway, tracers, trainers) is left out.
"""

import importlib.util
import os
import sys
import types

_LOOSE = ("agentlightning", "agentlightning.store")
"""Packages whose ``__init__`` imports what no store needs."""


def _make_loose() -> None:
    spec = importlib.util.find_spec("agentlightning")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = spec.submodule_search_locations[0]
    for name in _LOOSE:
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split(".")[1:])]
        sys.modules[name] = module


if __name__ == "__main__":
    import asyncio

    _make_loose()
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore
    from agentlightning.utils.server_launcher import PythonServerLauncherArgs

    async def main() -> None:
        """Serve, say where, and wait for the end of stdin."""
        arguments = PythonServerLauncherArgs(
            host="127.0.0.1",
            access_host="127.0.0.1",
            launch_mode="thread",
            healthcheck_url="/v1/agl/health",
        )
        store = InMemoryLightningStore(thread_safe=True)
        server = LightningStoreServer(store, launcher_args=arguments)
        await server.start()
        sys.stdout.write(f"{server.endpoint}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        await server.stop()

    asyncio.run(main())
