"""The engine keeps the contract: furnace's own checks, against a furnace behind it."""

from __future__ import annotations

from typing import ClassVar

from furnace_remote import RemoteOptions
from furnace_remote.engine import RemoteEngine

import furnace
from furnace.testing import EngineConformance


class TestRemote(EngineConformance):
    """Against ``mock:lorem`` on a server in this process."""

    # The API does not say which stop string ended an output.
    test_a_stop_string_ends_the_output_and_is_not_in_it = None
    test_of_several_stop_strings_the_first_that_is_complete_wins = None
    test_a_stop_string_in_the_last_place_is_a_stop = None
    # Nor has it a deadline, and the other server may say nothing before the first token: see generate().
    test_a_request_does_not_wait_beyond_its_deadline = None
    test_a_deadline_of_zero_is_a_deadline = None
    test_generate_does_not_wait_for_a_place = None

    server: ClassVar[furnace.Server]

    @classmethod
    def setup_class(cls) -> None:
        super().setup_class()
        cls.server = furnace.Server(port=0).llm("mock:lorem")
        cls.background = cls.server.background()
        cls.background.__enter__()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.background.__exit__(None, None, None)

    def make_engine(self) -> furnace.LlmEngine:
        return RemoteEngine("lorem", RemoteOptions(url=f"{self.server.url}/v1", max_context=512), None)
