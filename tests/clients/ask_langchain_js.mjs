// What users of LangChain for JavaScript write, as ask_ai_sdk.mjs has it of the AI SDK: URL, URL of a calling model.
import { ChatOpenAI, OpenAI } from '@langchain/openai';
import { tool } from '@langchain/core/tools';
import { z } from 'zod';

const [url, callsUrl] = process.argv.slice(2);
const options = (base, more = {}) => ({
  model: 'fake',
  apiKey: 'x',
  maxRetries: 0,
  configuration: { baseURL: `${base}/v1` },
  ...more,
});
const schema = z.object({ city: z.string() });
const weather = tool(async ({ city }) => `fine in ${city}`, { name: 'weather', description: 'of a city', schema });

const answers = [];
const ask = async (what, run) => {
  try {
    answers.push([what, true, String(await run())]);
  } catch (error) {
    answers.push([what, false, String(error)]);
  }
};
const streamed = async (model) => {
  let text = '';
  for await (const piece of await model.stream('hi')) text += piece.text;
  return text;
};

for (const [kind, more] of [['chat', {}], ['response', { useResponsesApi: true }]]) {
  const plain = new ChatOpenAI(options(url, more));
  const calling = new ChatOpenAI(options(callsUrl, more)).bindTools([weather]);
  await ask(kind, async () => (await plain.invoke('hi')).text);
  await ask(`${kind}, streamed`, () => streamed(plain));
  await ask(`${kind}, call of a function`, async () => (await calling.invoke('hi')).tool_calls[0].args.city);
}
await ask('completion', () => new OpenAI(options(url)).invoke('One fine'));
process.stdout.write(JSON.stringify(answers));
