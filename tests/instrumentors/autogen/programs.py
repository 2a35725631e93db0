"""Programs of agents as users write them; each is given a model client and gives a result."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent, UserProxyAgent
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import CancellationToken


def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


async def broken(expression: str) -> str:
    """Never work."""
    raise ValueError(f"no: {expression}")


def agent(name: str, client: Any, **more: Any) -> AssistantAgent:
    """An assistant whose requests say who it is."""
    return AssistantAgent(name, client, system_message=f"You are {name}.", **more)


async def one_agent(client: Any) -> Any:
    """One agent with a tool, which tells what the tool gave."""
    return await agent("calc", client, tools=[calculator], reflect_on_tool_use=True).run(task="go")


async def streamed(client: Any) -> Any:
    """The same as a stream, down to the model."""
    calc = agent(
        "calc", client, tools=[calculator], reflect_on_tool_use=True, model_client_stream=True
    )
    return [item async for item in calc.run_stream(task="go")]


async def parallel_tools(client: Any) -> Any:
    """One agent that calls two tools at once, of which one raises."""
    return await agent("calc", client, tools=[calculator, broken]).run(task="go")


async def round_robin(client: Any) -> Any:
    """Two agents in turn."""
    team = RoundRobinGroupChat(
        [agent("writer", client), agent("critic", client, tools=[calculator])],
        termination_condition=MaxMessageTermination(4),
    )
    return await team.run(task="go")


async def streamed_team(client: Any) -> Any:
    """Two agents in turn, as a stream, and once more."""
    team = RoundRobinGroupChat(
        [agent("writer", client, model_client_stream=True), agent("critic", client)], max_turns=2
    )
    first = [item async for item in team.run_stream(task="go")]
    return first + [item async for item in team.run_stream()]


async def selector(client: Any) -> Any:
    """A model chooses who speaks."""
    team = SelectorGroupChat(
        [agent("writer", client), agent("critic", client)],
        client,
        max_turns=2,
        selector_prompt="Choose from {participants}. {roles} {history}",
        allow_repeated_speaker=True,
    )
    return await team.run(task="go")


async def swarm(client: Any) -> Any:
    """One agent hands over to another, and that to the user."""
    team = Swarm(
        [
            agent("writer", client, handoffs=["critic"]),
            agent("critic", client, handoffs=["user"]),
        ],
        termination_condition=HandoffTermination("user") | MaxMessageTermination(6),
    )
    return await team.run(task="go")


async def magentic_one(client: Any) -> Any:
    """An orchestrator plans, asks and sums up."""
    team = MagenticOneGroupChat([agent("writer", client)], client, max_turns=4)
    return await team.run(task="go")


async def agent_tool(client: Any) -> Any:
    """An agent as another one's tool."""
    helper = AgentTool(agent("helper", client), return_value_as_last_message=True)
    return await agent("boss", client, tools=[helper]).run(task="go")


async def team_tool(client: Any) -> Any:
    """A team as an agent's tool."""
    team = RoundRobinGroupChat([agent("helper", client)], max_turns=1, name="helpers")
    tool = TeamTool(team, name="helpers", description="They help.")
    return await agent("boss", client, tools=[tool], reflect_on_tool_use=True).run(task="go")


async def society_of_mind(client: Any) -> Any:
    """A team within an agent within a team."""
    inner = RoundRobinGroupChat(
        [agent("writer", client), agent("critic", client)], max_turns=2, name="mind"
    )
    society = SocietyOfMindAgent("society", team=inner, model_client=client)
    return await RoundRobinGroupChat([society], max_turns=1, name="outer").run(task="go")


async def nested_teams(client: Any) -> Any:
    """A team as a member of a team."""
    inner = RoundRobinGroupChat([agent("writer", client)], max_turns=1, name="inner")
    outer = RoundRobinGroupChat([inner, agent("critic", client)], max_turns=2, name="outer")
    return await outer.run(task="go")


async def graph(client: Any) -> Any:
    """A graph that forks, so that two agents speak at once."""
    first, second, third = (agent(name, client) for name in ("writer", "critic", "third"))
    edges = DiGraphBuilder()
    edges.add_node(first).add_node(second).add_node(third)
    edges.add_edge(first, second).add_edge(first, third)
    return await GraphFlow([first, second, third], graph=edges.build()).run(task="go")


async def with_user(client: Any) -> Any:
    """A person in the team, whose words are a function's here."""
    person = UserProxyAgent("person", input_func=lambda prompt: "go on")
    return await RoundRobinGroupChat([agent("writer", client), person], max_turns=3).run(task="go")


async def own_methods(client: Any) -> Any:
    """An agent called by its own methods, which are runs of it."""
    writer, asked = agent("writer", client), [TextMessage(content="go", source="user")]
    await writer.on_messages(asked, CancellationToken())
    stream = writer.on_messages_stream(asked, CancellationToken())
    return [getattr(item, "chat_message", item) async for item in stream]


ALL = (
    one_agent,
    streamed,
    parallel_tools,
    round_robin,
    streamed_team,
    selector,
    swarm,
    magentic_one,
    agent_tool,
    team_tool,
    society_of_mind,
    nested_teams,
    graph,
    with_user,
    own_methods,
)
