"""The OpenAI Agents SDK over the Responses API, streamed: events of two agents and a tool."""

import asyncio

from agents import Agent, Runner, function_tool, set_trace_processors, trace

# The traces of the SDK itself would go to OpenAI, whatever server is used.
set_trace_processors([])


@function_tool
async def get_weather(city: str) -> str:
    """The weather in a city."""
    await asyncio.sleep(0)
    return f"fog in {city}"


reporter = Agent("reporter", instructions="Report.", model="toy", tools=[get_weather])
desk = Agent(
    "desk", instructions="Send weather questions to the reporter.", model="toy", handoffs=[reporter]
)


async def main():
    with trace("news"):
        result = Runner.run_streamed(desk, "How is the weather in 'Lima'?")
        kinds = []
        async for event in result.stream_events():
            if event.type == "run_item_stream_event":
                kinds.append(event.name)
            elif event.type == "agent_updated_stream_event":
                kinds.append(f"now {event.new_agent.name}")
        print(kinds)
        print(result.last_agent.name, "|", result.final_output)
    again = Runner.run_streamed(reporter, "Just say hello.")
    async for event in again.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            print(event.data.delta, end="|")
    print()


if __name__ == "__main__":
    asyncio.run(main())
