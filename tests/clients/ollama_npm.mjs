// Ollama's library for JavaScript.
import { readFileSync } from "node:fs";
import { Ollama } from "ollama";

const { CHECK_URL, CHECK_KEY: key, CHECK_FACTS } = process.env;
const { model, messages, tooLong, schema, tool } = JSON.parse(CHECK_FACTS);
const host = CHECK_URL.replace(/\/v1$/, "");
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });
const short = { num_predict: 8 };
const say = (line) => console.log(JSON.stringify(line));

function expect(condition, said) {
  if (!condition) throw new Error(JSON.stringify(said).slice(0, 500));
}

async function check(what, does) {
  try {
    await does();
    say({ what, why: "" });
  } catch (error) {
    say({ what, why: `${error.name}: ${error.message}` });
  }
}

async function rejects(status, asking, words = "") {
  try {
    await asking();
  } catch (error) {
    expect(error.status_code === status && error.message.includes(words), { got: error.status_code, said: error.message });
    return;
  }
  throw new Error("no error");
}

async function all(stream) {
  const parts = [];
  for await (const part of await stream) parts.push(part);
  return parts;
}

say({ version: JSON.parse(readFileSync("node_modules/ollama/package.json")).version });

await check("list", async () => {
  const { models } = await client.list();
  expect(models.length === 1 && models[0].name === `${model}:latest` && models[0].details.family, models);
});
await check("version", async () => {
  const { version } = await client.version();
  expect(/^\d+\.\d+\.\d+$/.test(version), version);
});
await check("show", async () => {
  const found = await client.show({ model });
  const architecture = found.model_info["general.architecture"];
  expect(found.capabilities.includes("completion") && found.model_info[`${architecture}.context_length`] > 0, found);
});
await check("chat", async () => {
  const answer = await client.chat({ model, messages, options: short });
  expect(answer.message.content && answer.done && answer.eval_count > 0, answer);
});
await check("ps", async () => {
  const { models } = await client.ps();
  expect(models.length === 1 && !Number.isNaN(Date.parse(models[0].expires_at)), models);
});
await check("stream", async () => {
  const parts = await all(client.chat({ model, messages, options: short, stream: true }));
  expect(parts.map((part) => part.message.content).join("") && parts.at(-1).done, parts);
});
await check("leave", async () => {
  const stream = await client.chat({ model, messages, options: { num_predict: 500 }, stream: true });
  try {
    for await (const part of stream) if (part.message.content) stream.abort();
  } catch (error) {
    expect(error.name === "AbortError", error.name);
  }
});
await check("structured", async () => {
  const options = { num_predict: 60, temperature: 0 };
  const answer = await client.chat({ model, messages, format: schema, options });
  const { city, number } = JSON.parse(answer.message.content);
  expect(["Paris", "Rome"].includes(city) && [1, 2].includes(number), answer);
});
await check("tools", async () => {
  const called = { role: "assistant", content: "", tool_calls: [{ function: { name: "look_up", arguments: { city: "Rome", number: 1 } } }] };
  const history = [...messages, called, { role: "tool", content: "It is old.", tool_name: "look_up" }];
  const answer = await client.chat({ model, messages: history, tools: [tool], options: short });
  expect(answer.done, answer);
});
await check("think", () => rejects(400, () => client.chat({ model, messages, think: true }), "does not support thinking"));
await check("generate", async () => {
  const answer = await client.generate({ model, prompt: "Say hello.", system: "Be brief.", options: short });
  expect(answer.response && answer.done_reason, answer);
  const parts = await all(client.generate({ model, prompt: "One, two,", raw: true, options: short, stream: true }));
  expect(parts.map((part) => part.response).join(""), parts);
});
await check("embed", async () => {
  const answer = await client.embed({ model, input: ["one", "two"] });
  expect(answer.embeddings.length === 2 && answer.embeddings[0].length > 100, answer.embeddings.length);
});
await check("pull", async () => {
  const parts = await all(client.pull({ model, stream: true }));
  expect(parts.at(-1).status === "success", parts);
  await rejects(400, () => client.pull({ model: "llama3.2" }), "Hugging Face");
});
await check("400", () => rejects(400, () => client.chat({ model, messages, options: { temperature: -1 } }), "temperature"));
await check("401", () => rejects(401, () => new Ollama({ host, headers: { Authorization: "Bearer wrong" } }).list(), "key"));
await check("404", () => rejects(404, () => client.chat({ model: "nowhere", messages }), "not found"));
await check("501", () => rejects(501, () => client.copy({ source: model, destination: "other" })));
await check("too long", () => rejects(400, () => client.chat({ model, messages: tooLong }), "context"));
