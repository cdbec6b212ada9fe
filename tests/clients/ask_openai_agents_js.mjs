// What users of OpenAI's agents for JavaScript write, as ask_ai_sdk.mjs has it of the AI SDK: URL, URL of a calling model.
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from '@openai/agents';
import OpenAI from 'openai';
import { z } from 'zod';

setTracingDisabled(true);
const [url, callsUrl] = process.argv.slice(2);
const weather = tool({
  name: 'weather',
  description: 'of a city',
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `fine in ${city}`,
});
const agent = (Model, base) => {
  const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: 'x', maxRetries: 0 });
  return new Agent({ name: 'a', model: new Model(client, 'fake'), tools: [weather] });
};

const answers = [];
const ask = async (what, run) => {
  try {
    answers.push([what, true, String(await run())]);
  } catch (error) {
    answers.push([what, false, String(error)]);
  }
};
const streamed = async (Model) => {
  const stream = await run(agent(Model, url), 'hi', { stream: true });
  let text = '';
  for await (const piece of stream.toTextStream()) text += piece;
  await stream.completed;
  return text;
};
const called = async (Model) => {
  const { newItems, finalOutput } = await run(agent(Model, callsUrl), 'hi');
  return [...newItems.filter((item) => item.type === 'tool_call_output_item').map((item) => item.output), finalOutput];
};

for (const [kind, Model] of [['chat', OpenAIChatCompletionsModel], ['response', OpenAIResponsesModel]]) {
  await ask(kind, async () => (await run(agent(Model, url), 'hi')).finalOutput);
  await ask(`${kind}, streamed`, () => streamed(Model));
  await ask(`${kind}, with a tool`, () => called(Model));
}
process.stdout.write(JSON.stringify(answers));
