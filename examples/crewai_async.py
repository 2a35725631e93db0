"""A CrewAI crew that is started asynchronously, with a model that streams its answers."""

import asyncio

from crewai import LLM, Agent, Crew, Task

llm = LLM(
    model="openai/gpt-4.1-mini",
    stream=True,
    additional_params={"extra_body": {"return_token_ids": True}},
)
poet = Agent(role="poet", goal="Make verses", backstory="You like words.", llm=llm)


async def write(topic):
    task = Task(description=f"A verse on {topic}.", expected_output="A verse", agent=poet)
    crew = Crew(agents=[poet], tasks=[task], name=topic)
    result = await crew.kickoff_async()
    return len(result.raw.split())


async def main():
    for topic in ("rain", "snow"):
        print(topic, "|", await write(topic), "words")


if __name__ == "__main__":
    asyncio.run(main())
