// nats.js as its users use it. Prints one line of JSON: what came of each thing that it tried.
//
//     node check.js all URL                  everything on an open server
//     node check.js acked URL                what a class keeps until it is acknowledged
//     node check.js confirmed URL            PubAcks of a class
//     node check.js again URL                says "ready", waits for a restart, and goes on
//     node check.js denied URL USER PASSWORD what it may not
//     node check.js certified URL TOKEN AUTHORITY CERTIFICATE KEY    with TLS, of these files
//
// Rule 1: nothing is judged here. What comes out is compared by the test that runs it.

import { jetstream } from "@nats-io/jetstream";
import { Svcm } from "@nats-io/services";
import { connect, createInbox, headers } from "@nats-io/transport-node";

const PATIENCE = 60_000;

async function take(subscription, count) {
  const found = [];
  if (count === 0) return found;
  for await (const message of subscription) {
    found.push(message);
    if (found.length === count) break;
  }
  return found;
}

function failure(promise) {
  return promise.then(
    () => "nothing",
    (error) => error.name + (error.isNoResponders?.() ? " no responders" : ""),
  );
}

async function plain(url) {
  const nc = await connect({ servers: url, name: "check" });
  const payloads = ["", "\r\n", "PUB x 1\r\n", "é", "x".repeat(1 << 20)];
  const subscription = nc.subscribe("js.plain.*", { max: payloads.length });
  for (const payload of payloads) nc.publish("js.plain.it", payload, { reply: "js.reply" });
  const found = [];
  for await (const message of subscription) found.push(message);
  const mine = {
    proto: nc.info.proto,
    headers: nc.info.headers,
    max_payload: nc.info.max_payload,
    equal: found.map((message, at) => message.string() === payloads[at]),
    subject: found[0].subject,
    reply: found[0].reply,
    closed: subscription.isClosed(),
    rtt: (await nc.rtt()) < PATIENCE,
  };
  await nc.close();
  return mine;
}

async function options(url) {
  const found = [];
  for (const each of [{ verbose: true }, { pedantic: true }, { noEcho: true }]) {
    const nc = await connect({ servers: url, ...each });
    const other = await connect({ servers: url });
    const subscription = nc.subscribe("js.options");
    await nc.flush();
    nc.publish("js.options", "own");
    await nc.flush();
    other.publish("js.options", "other");
    found.push((await take(subscription, each.noEcho ? 1 : 2)).map((message) => message.string()));
    await nc.close();
    await other.close();
  }
  return found;
}

async function queue(url) {
  const count = 300;
  const members = await Promise.all([1, 2, 3].map(() => connect({ servers: url })));
  const got = members.map(() => []);
  let total = 0;
  const all = new Promise((resolve) => {
    members.forEach((member, at) => {
      member.subscribe("js.queue", {
        queue: "workers",
        callback: (_, message) => {
          got[at].push(Number(message.string()));
          if (++total === count) resolve();
        },
      });
    });
  });
  await Promise.all(members.map((member) => member.flush()));
  for (let n = 0; n < count; n++) members[0].publish("js.queue", String(n));
  await all;
  await Promise.all(members.map((member) => member.drain()));
  return {
    different: new Set(got.flat()).size,
    total,
    everybody: got.every((mine) => mine.length > 0),
    ordered: got.every((mine) => mine.every((n, at) => at === 0 || mine[at - 1] < n)),
  };
}

async function requests(url) {
  const nc = await connect({ servers: url });
  nc.subscribe("js.double", {
    callback: (_, message) => {
      const more = headers();
      more.append("Times", "2");
      more.append("Asked", message.headers?.get("Asked") ?? "");
      message.respond(message.string() + message.string(), { headers: more });
    },
  });
  nc.subscribe("js.silent");
  const asked = headers();
  asked.append("Asked", "a:b");
  const one = await nc.request("js.double", "ab", { timeout: PATIENCE, headers: asked });
  const own = { timeout: PATIENCE, noMux: true, reply: createInbox("_OWN") };
  const mine = {
    reply: one.string(),
    headers: [one.headers.get("Times"), one.headers.get("Asked")],
    own: (await nc.request("js.double", "c", own)).string(),
    nobody: await failure(nc.request("js.nobody", "", { timeout: PATIENCE })),
    silent: await failure(nc.request("js.silent", "", { timeout: 50 })),
  };
  await nc.close();
  return mine;
}

async function draining(url) {
  const nc = await connect({ servers: url });
  const other = await connect({ servers: url });
  const results = other.subscribe("js.results");
  await other.flush();
  nc.subscribe("js.work", { callback: (_, message) => nc.publish("js.results", message.data) });
  await nc.flush();
  for (let n = 0; n < 50; n++) other.publish("js.work", String(n));
  await other.flush();
  await nc.drain();
  const found = (await take(results, 50)).map((message) => Number(message.string()));
  await other.close();
  return { inOrder: found.every((n, at) => n === at), closed: nc.isClosed() };
}

async function services(url) {
  const nc = await connect({ servers: url });
  const service = await new Svcm(nc).add({ name: "adding", version: "1.0.0" });
  service.addGroup("math").addEndpoint("add", (_, message) => {
    const numbers = message.json();
    if (numbers.length === 0) message.respondError(400, "nothing to add");
    else message.respond(JSON.stringify(numbers.reduce((a, b) => a + b)));
  });
  await nc.flush();
  const ask = (numbers) => nc.request("math.add", JSON.stringify(numbers), { timeout: PATIENCE });
  const sum = (await ask([1, 2, 3])).json();
  const refused = await ask([]);
  const client = new Svcm(nc).client({ strategy: "stall", maxMessages: 1, maxWait: PATIENCE });
  const first = async (found) => (await take(await found, 1))[0];
  const ping = await first(client.ping("adding"));
  const info = await first(client.info("adding"));
  const stats = await first(client.stats("adding"));
  await service.stop();
  await nc.close();
  return {
    sum,
    refused: refused.headers.get("Nats-Service-Error"),
    name: ping.name,
    same: ping.id === info.id && info.id === stats.id,
    endpoint: info.endpoints[0].subject,
    asked: stats.endpoints[0].num_requests,
  };
}

async function all(url) {
  const found = {};
  for (const each of [plain, options, queue, requests, draining, services])
    found[each.name] = await each(url);
  return found;
}

async function acked(url) {
  const nc = await connect({ servers: url });
  for (let n = 0; n < 4; n++) nc.publish("kept.js.it", String(n));
  const subscription = nc.subscribe("$SB.SUB.js.reader");
  const found = [];
  let confirmed = 0;
  for await (const message of subscription) {
    const [, , stream, consumer, attempt, sequence] = message.reply.split(".");
    found.push([message.string(), stream, consumer, Number(attempt), Number(sequence)]);
    if (attempt !== "1") {
      const answer = await nc.request(message.reply, "+ACK", { timeout: PATIENCE });
      confirmed += answer.data.length === 0;
    } else if (message.string() === "0") message.respond();
    else if (message.string() === "1") message.respond("-NAK 0s");
    else if (message.string() === "2") message.respond("+TERM");
    else {
      message.respond("+WPI");
      message.respond('-NAK {"delay": 50000000}');
    }
    if (found.length === 6) break;
  }
  const rest = nc.subscribe("$SB.SUB.js.reader");
  nc.publish("kept.js.it", "next");
  const [next] = await take(rest, 1);
  await nc.close();
  return { found: found.sort(), confirmed, next: next.string() };
}

async function again(url) {
  const nc = await connect({ servers: url, reconnectTimeWait: 20, maxReconnectAttempts: -1 });
  const subscription = nc.subscribe("js.again");
  await nc.flush();
  const kinds = [];
  const back = new Promise((resolve) => {
    (async () => {
      for await (const status of nc.status()) {
        kinds.push(status.type);
        if (status.type === "reconnect") resolve();
      }
    })();
  });
  console.log("ready");
  await back;
  nc.publish("js.again", "after"); // What it publishes before, it forgets.
  const found = (await take(subscription, 1)).map((message) => message.string());
  await nc.close();
  return { found, told: ["disconnect", "reconnect"].every((kind) => kinds.includes(kind)) };
}

async function confirmed(url) {
  const nc = await connect({ servers: url });
  const js = jetstream(nc, { timeout: PATIENCE });
  const found = [];
  for (const msgID of ["first", "second", "first"]) {
    const ack = await js.publish("kept.confirmed.js", "x", { msgID });
    found.push([ack.stream, ack.seq, ack.duplicate]);
  }
  const wrong = { expect: { streamName: "others" } };
  const error = await js.publish("kept.confirmed.js", "x", wrong).catch((error) => error);
  await nc.close();
  return { found, code: error.code, refused: error.message.split(":")[0] };
}

async function denied(url, user, pass) {
  const wrong = await failure(connect({ servers: url, user, pass: "wrong" }));
  const nc = await connect({ servers: url, user, pass });
  const subscription = nc.subscribe("not.yours");
  const heard = await failure(take(subscription, 1));
  const kinds = [];
  const told = new Promise((resolve) => {
    (async () => {
      for await (const status of nc.status()) {
        kinds.push(status.error?.message ?? status.type);
        resolve();
      }
    })();
  });
  nc.publish("not.yours", "x");
  await told;
  const open = !nc.isClosed();
  await nc.close();
  return { wrong, heard, told: kinds[0], open };
}

async function certified(url, token, caFile, certFile, keyFile) {
  const nc = await connect({ servers: url, token, tls: { caFile, certFile, keyFile } });
  const subscription = nc.subscribe("js.certified");
  nc.publish("js.certified", new Uint8Array(65536));
  const [message] = await take(subscription, 1);
  const required = nc.info.tls_required;
  await nc.close();
  return { length: message.data.length, required };
}

const [mode, ...rest] = process.argv.slice(2);
console.log(JSON.stringify(await { acked, all, again, certified, confirmed, denied }[mode](...rest)));
