// Anthropic's library for Node, against a server over TCP.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const { CHECK_URL, CHECK_KEY: key, CHECK_FACTS } = process.env;
const { model, messages, tooLong, schema } = JSON.parse(CHECK_FACTS);
const baseURL = CHECK_URL.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey: key, maxRetries: 0 });
const tools = [{ name: "look_up", description: "Look a city up.", input_schema: schema }];
const tool_choice = { type: "tool", name: "look_up", disable_parallel_tool_use: true };
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

async function rejects(kind, asking) {
  try {
    await asking();
  } catch (error) {
    expect(error instanceof kind, { got: error.constructor.name, said: error.message });
    return;
  }
  throw new Error(`no ${kind.name}`);
}

const ask = (more = {}, by = client) => by.messages.create({ model, messages, max_tokens: 8, ...more });

say({ version: JSON.parse(readFileSync("node_modules/@anthropic-ai/sdk/package.json")).version });

await check("create", async () => {
  const answer = await ask({ system: "You are kind." });
  expect(answer.content[0].text && answer.usage.output_tokens > 0, answer);
});
await check("stream", async () => {
  let text = "";
  const stream = client.messages.stream({ model, messages, max_tokens: 8 }).on("text", (part) => (text += part));
  const answer = await stream.finalMessage();
  expect(text && answer.content[0].text === text && answer.usage.output_tokens > 0, answer);
});
await check("leave", async () => {
  for await (const event of await ask({ stream: true, max_tokens: 500 })) {
    if (event.type === "content_block_delta") break;
  }
});
await check("tools", async () => {
  const answer = await ask({ tools, tool_choice, max_tokens: 80, temperature: 0 });
  const call = answer.content.find((block) => block.type === "tool_use");
  expect(answer.stop_reason === "tool_use" && ["Paris", "Rome"].includes(call.input.city), answer);
  const content = [{ type: "tool_result", tool_use_id: call.id, content: "A city." }];
  const turns = [{ role: "assistant", content: answer.content }, { role: "user", content }];
  const next = await ask({ tools, messages: [...messages, ...turns] });
  expect(next.usage.cache_read_input_tokens > 0, next);
});
await check("streamed tools", async () => {
  const stream = client.messages.stream({ model, messages, tools, tool_choice, max_tokens: 80, temperature: 0 });
  const answer = await stream.finalMessage();
  const call = answer.content.find((block) => block.type === "tool_use");
  expect([1, 2].includes(call.input.number), answer);
});
await check("count tokens", async () => {
  const { input_tokens } = await client.messages.countTokens({ model, messages });
  const { usage } = await ask();
  expect(input_tokens === usage.input_tokens + usage.cache_read_input_tokens, { input_tokens, usage });
});
await check("models", async () => {
  const names = [];
  for await (const found of client.models.list()) names.push(found.id);
  expect(names.length === 1 && names[0] === model, names);
});
await check("400", () => rejects(Anthropic.BadRequestError, () => ask({ temperature: -1 })));
await check("401", () =>
  rejects(Anthropic.AuthenticationError, () => ask({}, new Anthropic({ baseURL, apiKey: "wrong", maxRetries: 0 }))));
await check("404", () => rejects(Anthropic.NotFoundError, () => ask({ model: "another" })));
await check("too long", () => rejects(Anthropic.BadRequestError, () => ask({ messages: tooLong })));
