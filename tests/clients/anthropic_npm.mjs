// Anthropic's library for Node, against a server over TCP.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const { CHECK_URL, CHECK_KEY: apiKey, CHECK_FACTS } = process.env;
const { model, messages, tooLong, schema } = JSON.parse(CHECK_FACTS);
const baseURL = CHECK_URL.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0 });
const say = (line) => console.log(JSON.stringify(line));
const tools = [{ name: "look_up", description: "Look a city up.", input_schema: schema }];
const ask = (more = {}, by = client) => by.messages.create({ model, messages, max_tokens: 8, ...more });

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
    expect(error.constructor === kind, { got: error.constructor.name, said: error.message });
    return;
  }
  throw new Error(`no ${kind.name}`);
}

say({ version: JSON.parse(readFileSync("node_modules/@anthropic-ai/sdk/package.json")).version });

await check("create", async () => {
  const answer = await ask({ system: "Be brief." });
  expect(answer.content[0].text && answer.usage.output_tokens > 0, answer);
});
await check("stream", async () => {
  let text = "";
  const stream = client.messages.stream({ model, messages, max_tokens: 8 }).on("text", (part) => (text += part));
  const final = await stream.finalMessage();
  expect(text && final.content[0].text === text && final.stop_reason, final);
});
await check("tool and its result", async () => {
  const choice = { type: "tool", name: "look_up", disable_parallel_tool_use: true };
  const stream = client.messages.stream({ model, messages, max_tokens: 100, temperature: 0, tools, tool_choice: choice });
  const answer = await stream.finalMessage();
  const call = answer.content.find((block) => block.type === "tool_use");
  expect(answer.stop_reason === "tool_use" && ["Paris", "Rome"].includes(call.input.city), answer);
  const result = { type: "tool_result", tool_use_id: call.id, content: "rain" };
  const turns = [{ role: "assistant", content: answer.content }, { role: "user", content: [result] }];
  const then = await ask({ messages: [...messages, ...turns], tools });
  expect(then.usage.output_tokens > 0 && then.usage.cache_read_input_tokens > 0, then);
});
await check("count_tokens", async () => {
  const { input_tokens: n } = await client.messages.countTokens({ model, messages });
  const { usage } = await ask();
  expect(n === usage.input_tokens + usage.cache_read_input_tokens, { n, usage });
});
await check("models", async () => {
  const found = [];
  for await (const one of client.models.list()) found.push(one.id);
  expect(found.length === 1 && found[0] === model, found);
});
await check("errors", async () => {
  await rejects(Anthropic.NotFoundError, () => ask({ model: "other" }));
  await rejects(Anthropic.BadRequestError, () => ask({ messages: tooLong }));
  const wrong = new Anthropic({ baseURL, apiKey: "wrong", maxRetries: 0 });
  await rejects(Anthropic.AuthenticationError, () => ask({}, wrong));
});
await check("left in the middle", async () => {
  const stream = await ask({ stream: true, max_tokens: 500 });
  for await (const event of stream) if (event.type === "content_block_delta") break;
  const answer = await ask();
  expect(answer.content.length, answer);
});
