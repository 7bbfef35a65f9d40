// Claude Code, against a model that follows a script: it reads a file and edits it.
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";

const { CHECK_SCRIPTED: base } = process.env;
const say = (line) => console.log(JSON.stringify(line));
const home = mkdtempSync(resolve("home-"));
const file = join(home, "work", "colours.txt");
mkdirSync(join(home, "work"));
writeFileSync(file, "colour = red\n");

function claude(...args) {
  const env = {
    PATH: process.env.PATH,
    HOME: home,
    ANTHROPIC_BASE_URL: base,
    ANTHROPIC_AUTH_TOKEN: "none",
    ANTHROPIC_MODEL: "fake",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  };
  const options = { cwd: join(home, "work"), env, input: "", encoding: "utf8", timeout: 120_000 };
  return spawnSync(resolve("node_modules/.bin/claude"), args, options);
}

function check(what, does) {
  try {
    does();
    say({ what, why: "" });
  } catch (error) {
    say({ what, why: `${error.name}: ${error.message}` });
  }
}

function expect(condition, said) {
  if (!condition) throw new Error(JSON.stringify(said).slice(0, 500));
}

say({ version: JSON.parse(readFileSync("node_modules/@anthropic-ai/claude-code/package.json")).version });
check("a question", () => {
  const { status, stdout, stderr } = claude("-p", "Say something.");
  expect(status === 0 && stdout.includes("A change of colour"), { status, stdout, stderr });
});
check("a file read and edited", () => {
  const asked = ["-p", `change the colour in ${file}`, "--permission-mode", "acceptEdits", "--output-format", "json"];
  const { status, stdout, stderr } = claude(...asked);
  expect(status === 0, { status, stdout, stderr });
  const { result, is_error: failed, num_turns: turns } = JSON.parse(stdout);
  expect(!failed && turns === 3 && result === "The colour is blue now.", stdout);
  expect(readFileSync(file, "utf8") === "colour = blue\n", readFileSync(file, "utf8"));
});
