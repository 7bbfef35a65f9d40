// OpenAI's library for Node, against a server over TCP.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { CHECK_URL: baseURL, CHECK_KEY: key, CHECK_FACTS } = process.env;
const { model, messages, tooLong, schema, tool, hurry, hurried } = JSON.parse(CHECK_FACTS);
const client = new OpenAI({ baseURL, apiKey: key, maxRetries: 0 });
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

async function rejects(kind, asking, code) {
  try {
    await asking();
  } catch (error) {
    expect(error.constructor === kind, { got: error.constructor.name, said: error.message });
    expect(!code || error.code === code, { code: error.code });
    return;
  }
  throw new Error(`no ${kind.name}`);
}

const chat = (more = {}, by = client) => by.chat.completions.create({ model, messages, max_tokens: 8, ...more });

function goodCity(text) {
  const { city, number } = JSON.parse(text);
  expect(["Paris", "Rome"].includes(city) && [1, 2].includes(number), text);
}

// Whoever is alone is tried; beside a long answer the server can predict that it would not be in time.
async function refusesHurry() {
  for await (const chunk of await chat({ stream: true, max_tokens: 1500, ignore_eos: true })) {
    if (!chunk.choices[0]?.delta?.content) continue;
    await rejects(OpenAI.RateLimitError, () => chat({ messages: hurried, ...hurry }), "overloaded");
    break;
  }
}

async function pictures() {
  const { CHECK_SEEING_URL: url, CHECK_SEEN } = process.env;
  const seen = JSON.parse(CHECK_SEEN);
  const there = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
  const content = [
    { type: "text", text: seen.question },
    { type: "image_url", image_url: { url: `data:image/png;base64,${seen.picture}` } },
  ];
  const answer = await there.chat.completions.create({
    model: seen.model, messages: [{ role: "user", content }], max_tokens: 8, temperature: 0,
  });
  expect(answer.choices[0].message.content.trim() === seen.text.trim(), { got: answer.choices[0].message.content, want: seen.text });
  expect(answer.usage.prompt_tokens === seen.tokens && seen.tokens > seen.alone, answer.usage);
}

say({ version: JSON.parse(readFileSync("node_modules/openai/package.json")).version });

await check("chat", async () => {
  const answer = await chat({ logprobs: true });
  expect(answer.choices[0].message.content && answer.usage.completion_tokens > 0, answer);
});
await check("stream", async () => {
  let text = "";
  let usage = null;
  for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  expect(text && usage.completion_tokens > 0, { text, usage });
});
await check("leave", async () => {
  for await (const chunk of await chat({ stream: true, max_tokens: 500 })) {
    if (chunk.choices.length) break;
  }
});
await check("structured", async () => {
  const json_schema = { name: "city", strict: true, schema };
  const answer = await chat({ response_format: { type: "json_schema", json_schema }, max_tokens: 60, temperature: 0 });
  goodCity(answer.choices[0].message.content);
});
await check("tools", async () => {
  const answer = await chat({ tools: [tool], tool_choice: "required", max_tokens: 80, temperature: 0 });
  const call = answer.choices[0].message.tool_calls[0].function;
  expect(call.name === "look_up", answer);
  goodCity(call.arguments);
});
await check("completion", async () => {
  const answer = await client.completions.create({ model, prompt: ["One,", "Two,"], max_tokens: 4 });
  expect(answer.choices.length === 2, answer);
});
await check("embeddings", async () => {
  const answer = await client.embeddings.create({ model, input: ["one", "two"] });
  expect(answer.data.length === 2 && answer.data[0].embedding.length > 100, answer);
});
await check("pictures", pictures);
await check("models", async () => {
  const answer = await client.models.list();
  expect(answer.data[0].id === model, answer);
});
await check("400", () => rejects(OpenAI.BadRequestError, () => chat({ temperature: -1 })));
await check("401", () =>
  rejects(OpenAI.AuthenticationError, () => chat({}, new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }))));
await check("404", () => rejects(OpenAI.NotFoundError, () => client.models.retrieve("nowhere")));
await check("429", refusesHurry);
await check("too long", () =>
  rejects(OpenAI.BadRequestError, () => chat({ messages: tooLong }), "context_length_exceeded"));
