// Prints tokens from Outrider's gRPC API as they come: node generate.js PROTOS ADDRESS [ID...]
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

interface GenerateResponse {
  tokens: number[];
  numAccepted: number;
  finish: { completionTokens: number; speculation: { verifySteps: string } | null } | null;
}

interface VerifyClient extends grpc.Client {
  generate(request: object, options: grpc.CallOptions): grpc.ClientReadableStream<GenerateResponse>;
}

type VerifyService = new (address: string, credentials: grpc.ChannelCredentials) => VerifyClient;

function load(protos: string): VerifyService {
  const definition = loadSync("outrider/v1/verify.proto", { includeDirs: [protos], longs: String, defaults: true });
  const root = grpc.loadPackageDefinition(definition) as unknown as { outrider: { v1: { VerifyService: VerifyService } } };
  return root.outrider.v1.VerifyService;
}

function pack(ids: number[]): Buffer {
  const bytes = Buffer.alloc(4 * ids.length);
  ids.forEach((id, at) => bytes.writeInt32LE(id, 4 * at));
  return bytes;
}

function show(response: GenerateResponse): void {
  const words = response.tokens.map((token, at) => (at < response.numAccepted ? `[${token}]` : `${token}`));
  if (words.length > 0) console.log(words.join(" "));
  if (response.finish) {
    console.log(`${response.finish.completionTokens} tokens in ${response.finish.speculation?.verifySteps ?? 0} steps`);
  }
}

const [protos, address, ...words] = process.argv.slice(2);
const ids = words.length > 0 ? words.map((word) => (/^\d+$/.test(word) ? Number(word) : -1)) : [504, 3575, 282, 4649, 314];
if (protos === undefined || address === undefined || ids.some((id) => id < 0 || id >= 2 ** 31)) {
  console.error("usage: node generate.js PROTOS ADDRESS [ID...]");
  process.exit(2);
}
const client = new (load(protos))(address, grpc.credentials.createInsecure());
const stream = client.generate(
  { promptTokens: pack(ids), sampling: { temperature: 0, maxTokens: 16 } },
  { deadline: Date.now() + 60_000 },
);
stream.on("data", show);
stream.on("error", (error: grpc.ServiceError) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on("close", () => client.close());
