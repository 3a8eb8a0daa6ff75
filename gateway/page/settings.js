// The settings form as the body of a request, and back to nothing it does not know.

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const SPECULATIVE_NUMBERS = ["num_steps", "topk", "num_draft_tokens"];
const SEED_LIMIT = 2 ** 31;

// What the form says, without what is empty.
export function readSettings(form) {
  const fields = new FormData(form);
  const speculative = numbers(fields, SPECULATIVE_NUMBERS);
  if (fields.get("algorithm")) speculative.algorithm = fields.get("algorithm");
  const request = numbers(fields, NUMBERS);
  const stops = fields.get("stop").split(/\r?\n/).filter(Boolean).map(unescape);
  if (stops.length) request.stop = stops;
  return { request, speculative, system: fields.get("system").trim() };
}

// The body of one chat request. With `enabled` false the tokens are told all the same, all of them the target's.
export function chatBody(settings, messages, model, enabled) {
  const speculative = enabled ? settings.speculative : { enabled: false };
  return {
    model,
    messages: settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages,
    ...settings.request,
    stream: true,
    stream_options: { include_usage: true },
    speculative: { ...speculative, include_origins: true, include_trees: enabled },
  };
}

// The same settings with a seed, so that two runs draw the same tokens.
export function withSeed(settings) {
  const seed = settings.request.seed ?? Math.floor(Math.random() * SEED_LIMIT);
  return { ...settings, request: { ...settings.request, seed } };
}

function numbers(fields, names) {
  const given = names.filter((name) => fields.get(name) !== "");
  return Object.fromEntries(given.map((name) => [name, Number(fields.get(name))]));
}

function unescape(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
