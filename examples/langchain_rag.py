"""Retrieval: documents embedded into a vector store, found again, and answered from."""

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

TEXTS = ["Fjords were carved by ice.", "Geysers are heated by magma.", "Dunes wander."]

# Servers other than OpenAI's take texts; by default token ids would be sent.
embeddings = OpenAIEmbeddings(model="toy", check_embedding_ctx_length=False)
store = InMemoryVectorStore(embeddings)
store.add_documents([Document(text) for text in TEXTS])
retriever = store.as_retriever(search_kwargs={"k": 2})

prompt = ChatPromptTemplate.from_template("Answer {question} from this:\n{context}")
model = ChatOpenAI(model="toy", logprobs=True, extra_body={"return_token_ids": True})


def join(documents):
    return "\n".join(sorted(document.page_content for document in documents))


chain = (
    {"context": retriever | join, "question": RunnablePassthrough()}
    | prompt
    | model
    | StrOutputParser()
)

if __name__ == "__main__":
    print(chain.invoke("What carved the fjords?"))
    print(chain.batch(["Who wanders?", "What heats geysers?"]))
