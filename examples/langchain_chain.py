"""A LangChain chain of prompt, model and parser: invoked, streamed, in a batch, and async."""

import asyncio

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from langchain_openai import ChatOpenAI

prompt = ChatPromptTemplate.from_messages(
    [("system", "You write about {topic}."), ("human", "Write {count} lines.")]
)
model = ChatOpenAI(
    model="toy", temperature=0.2, logprobs=True, extra_body={"return_token_ids": True}
)
chain = prompt | model | StrOutputParser()


async def main():
    print(await chain.ainvoke({"topic": "rain", "count": "five"}))
    async for part in chain.astream({"topic": "snow", "count": "six"}):
        print(part, end="|")
    print()
    both = await asyncio.gather(
        *(chain.ainvoke({"topic": topic, "count": "ten"}) for topic in ("sun", "moon"))
    )
    print(both)


if __name__ == "__main__":
    print(chain.invoke({"topic": "birds", "count": "two"}))
    for part in chain.stream({"topic": "bees", "count": "three"}):
        print(part, end="|")
    print()
    topics = [{"topic": topic, "count": "four"} for topic in ("sea", "sand", "salt")]
    print(chain.batch(topics, config={"max_concurrency": 2}))
    parallel = RunnableParallel(one=chain, other=chain)
    print(sorted(parallel.invoke({"topic": "ice", "count": "no"}).items()))
    asyncio.run(main())
