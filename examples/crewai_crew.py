"""A CrewAI crew: two agents, two tasks one after the other, and a tool."""

from crewai import LLM, Agent, Crew, Process, Task
from crewai.tools import tool


@tool("calculator")
def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


llm = LLM(model="openai/gpt-4.1-mini", temperature=0.3)

accountant = Agent(
    role="accountant",
    goal="Work out sums",
    backstory="You like numbers.",
    tools=[calculator],
    llm=llm,
)
writer = Agent(role="writer", goal="Write letters", backstory="You like words.", llm=llm)

work_out = Task(
    description="Work out 17*23.", expected_output="A number", agent=accountant, name="work out"
)
write = Task(
    description="Write a letter about it.", expected_output="A letter", agent=writer, name="write"
)

if __name__ == "__main__":
    crew = Crew(
        agents=[accountant, writer],
        tasks=[work_out, write],
        process=Process.sequential,
        name="desk",
    )
    result = crew.kickoff()
    for output in result.tasks_output:
        print(output.agent, "|", output.raw)
