// Claude Code, which reads a file and edits it as a scripted model says (tests/clients/scripted_agent.py).
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";

const { CHECK_PYTHON: python, CHECK_ROOT: root, PATH } = process.env;
const say = (line) => console.log(JSON.stringify(line));
const command = resolve("node_modules/.bin/claude");
const folder = mkdtempSync(join(tmpdir(), "hetrun-claude-"));
const story = join(folder, "story.txt");
const ask = "Change the pigs in story.txt to wolves.";

say({ version: JSON.parse(readFileSync("node_modules/@anthropic-ai/claude-code/package.json")).version });

function claude(url, key, options = []) {
  writeFileSync(story, "There were three little pigs.\n");
  // As root it refuses to skip permissions altogether, so that single tools are allowed.
  const allowed = ["--allowedTools", "Read,Edit", "--permission-mode", "acceptEdits"];
  const env = { PATH, HOME: folder, ANTHROPIC_BASE_URL: url, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", ...key };
  const settings = { cwd: folder, env, input: "", encoding: "utf8", timeout: 120_000 };
  const done = spawnSync(command, ["-p", ask, "--model", "fake", ...allowed, ...options], settings);
  return { ...done, story: readFileSync(story, "utf8") };
}

function check(what, found, condition) {
  const { status, stdout, stderr, story: text } = found;
  say({ what, why: condition ? "" : JSON.stringify({ status, stdout, stderr, text }).slice(0, 800) });
}

const server = spawn(python, ["-m", "tests.clients.scripted_agent", story], { cwd: root });
try {
  const [url] = await once(createInterface(server.stdout), "line");
  const text = claude(url, { ANTHROPIC_API_KEY: "none" });
  check("read and edit", text, text.status === 0 && text.story === "There were three little wolves.\n");
  check("answer", text, text.stdout.trim() === "The file is changed.");
  const json = claude(url, { ANTHROPIC_AUTH_TOKEN: "none" }, ["--output-format", "json"]);
  const { num_turns, usage } = JSON.parse(json.stdout);
  check("usage", json, num_turns === 3 && usage.output_tokens > 0 && usage.cache_read_input_tokens > 0);
} finally {
  server.stdin.end();
  await once(server, "close");
  rmSync(folder, { recursive: true });
}
