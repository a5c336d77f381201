// Test program of the client library nats.js. Prints its results as one line of JSON, which the
// Python test compares with the expected results.
//
//     node check.js all URL                    functions that need no user and no class
//     node check.js acks URL                   acknowledgements of the messages of a class
//     node check.js pubacks URL                PubAcks of a class
//     node check.js reconnect URL              prints "ready", waits for a restart, and continues
//     node check.js denied URL USER PASSWORD   operations without permission
//     node check.js tls URL TOKEN AUTHORITY CERTIFICATE KEY    TLS with these files

import { jetstream } from "@nats-io/jetstream";
import { Svcm } from "@nats-io/services";
import { connect, createInbox, headers } from "@nats-io/transport-node";

const TIMEOUT_MS = 60_000;

async function receive(subscription, count) {
  const messages = [];
  if (count === 0) return messages;
  for await (const message of subscription) {
    messages.push(message);
    if (messages.length === count) break;
  }
  return messages;
}

function errorName(promise) {
  return promise.then(
    () => "no error",
    (error) => error.name + (error.isNoResponders?.() ? " no responders" : ""),
  );
}

async function publish(url) {
  const nc = await connect({ servers: url, name: "check" });
  const payloads = ["", "\r\n", "PUB x 1\r\n", "é", "x".repeat(1 << 20)];
  const subscription = nc.subscribe("js.plain.*", { max: payloads.length });
  for (const payload of payloads) nc.publish("js.plain.it", payload, { reply: "js.reply" });
  const messages = [];
  for await (const message of subscription) messages.push(message);
  const result = {
    proto: nc.info.proto,
    headers: nc.info.headers,
    max_payload: nc.info.max_payload,
    equal: messages.map((message, index) => message.string() === payloads[index]),
    subject: messages[0].subject,
    reply: messages[0].reply,
    isClosed: subscription.isClosed(),
    hasRtt: (await nc.rtt()) < TIMEOUT_MS,
  };
  await nc.close();
  return result;
}

async function options(url) {
  const payloads = [];
  for (const option of [{ verbose: true }, { pedantic: true }, { noEcho: true }]) {
    const nc = await connect({ servers: url, ...option });
    const other = await connect({ servers: url });
    const subscription = nc.subscribe("js.options");
    await nc.flush();
    nc.publish("js.options", "own");
    await nc.flush();
    other.publish("js.options", "other");
    const messages = await receive(subscription, option.noEcho ? 1 : 2);
    payloads.push(messages.map((message) => message.string()));
    await nc.close();
    await other.close();
  }
  return payloads;
}

async function queueGroup(url) {
  const count = 300;
  const members = await Promise.all([1, 2, 3].map(() => connect({ servers: url })));
  const received = members.map(() => []);
  let total = 0;
  const allReceived = new Promise((resolve) => {
    members.forEach((member, index) => {
      member.subscribe("js.queue", {
        queue: "workers",
        callback: (_, message) => {
          received[index].push(Number(message.string()));
          if (++total === count) resolve();
        },
      });
    });
  });
  await Promise.all(members.map((member) => member.flush()));
  for (let n = 0; n < count; n++) members[0].publish("js.queue", String(n));
  await allReceived;
  await Promise.all(members.map((member) => member.drain()));
  return {
    different: new Set(received.flat()).size,
    total,
    haveAllReceived: received.every((numbers) => numbers.length > 0),
    areOrdered: received.every((numbers) =>
      numbers.every((n, index) => index === 0 || numbers[index - 1] < n),
    ),
  };
}

async function requests(url) {
  const nc = await connect({ servers: url });
  nc.subscribe("js.double", {
    callback: (_, message) => {
      const replyHeaders = headers();
      replyHeaders.append("Times", "2");
      replyHeaders.append("Request-Header", message.headers?.get("Request-Header") ?? "");
      message.respond(message.string() + message.string(), { headers: replyHeaders });
    },
  });
  nc.subscribe("js.silent");
  const requestHeaders = headers();
  requestHeaders.append("Request-Header", "a:b");
  const requestOptions = { timeout: TIMEOUT_MS, headers: requestHeaders };
  const reply = await nc.request("js.double", "ab", requestOptions);
  const withInbox = { timeout: TIMEOUT_MS, noMux: true, reply: createInbox("_OWN") };
  const result = {
    reply: reply.string(),
    headers: [reply.headers.get("Times"), reply.headers.get("Request-Header")],
    withInbox: (await nc.request("js.double", "c", withInbox)).string(),
    noResponders: await errorName(nc.request("js.nobody", "", { timeout: TIMEOUT_MS })),
    timeout: await errorName(nc.request("js.silent", "", { timeout: 50 })),
  };
  await nc.close();
  return result;
}

async function drain(url) {
  const nc = await connect({ servers: url });
  const other = await connect({ servers: url });
  const results = other.subscribe("js.results");
  await other.flush();
  nc.subscribe("js.work", { callback: (_, message) => nc.publish("js.results", message.data) });
  await nc.flush();
  for (let n = 0; n < 50; n++) other.publish("js.work", String(n));
  await other.flush();
  await nc.drain();
  const numbers = (await receive(results, 50)).map((message) => Number(message.string()));
  await other.close();
  return { areOrdered: numbers.every((n, index) => n === index), isClosed: nc.isClosed() };
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
  const add = (numbers) => nc.request("math.add", JSON.stringify(numbers), { timeout: TIMEOUT_MS });
  const sum = (await add([1, 2, 3])).json();
  const refused = await add([]);
  const client = new Svcm(nc).client({ strategy: "stall", maxMessages: 1, maxWait: TIMEOUT_MS });
  const first = async (replies) => (await receive(await replies, 1))[0];
  const ping = await first(client.ping("adding"));
  const info = await first(client.info("adding"));
  const stats = await first(client.stats("adding"));
  await service.stop();
  await nc.close();
  return {
    sum,
    refused: refused.headers.get("Nats-Service-Error"),
    name: ping.name,
    haveSameId: ping.id === info.id && info.id === stats.id,
    endpoint: info.endpoints[0].subject,
    requestCount: stats.endpoints[0].num_requests,
  };
}

async function all(url) {
  const results = {};
  for (const check of [publish, options, queueGroup, requests, drain, services])
    results[check.name] = await check(url);
  return results;
}

async function acks(url) {
  const nc = await connect({ servers: url });
  for (let n = 0; n < 4; n++) nc.publish("kept.js.it", String(n));
  const subscription = nc.subscribe("$SB.SUB.js.reader");
  const received = [];
  let confirmedCount = 0;
  for await (const message of subscription) {
    const [, , stream, consumer, attempt, sequence] = message.reply.split(".");
    received.push([message.string(), stream, consumer, Number(attempt), Number(sequence)]);
    if (attempt !== "1") {
      const confirm = await nc.request(message.reply, "+ACK", { timeout: TIMEOUT_MS });
      confirmedCount += confirm.data.length === 0;
    } else if (message.string() === "0") message.respond();
    else if (message.string() === "1") message.respond("-NAK 0s");
    else if (message.string() === "2") message.respond("+TERM");
    else {
      message.respond("+WPI");
      message.respond('-NAK {"delay": 50000000}');
    }
    if (received.length === 6) break;
  }
  const resumed = nc.subscribe("$SB.SUB.js.reader");
  nc.publish("kept.js.it", "next");
  const [next] = await receive(resumed, 1);
  await nc.close();
  return { received: received.sort(), confirmedCount, next: next.string() };
}

async function reconnect(url) {
  const nc = await connect({ servers: url, reconnectTimeWait: 20, maxReconnectAttempts: -1 });
  const subscription = nc.subscribe("js.reconnect");
  await nc.flush();
  const events = [];
  const reconnected = new Promise((resolve) => {
    (async () => {
      for await (const status of nc.status()) {
        events.push(status.type);
        if (status.type === "reconnect") resolve();
      }
    })();
  });
  console.log("ready");
  await reconnected;
  nc.publish("js.reconnect", "after reconnect"); // Earlier messages are not resent.
  const received = (await receive(subscription, 1)).map((message) => message.string());
  await nc.close();
  const hasEvents = ["disconnect", "reconnect"].every((event) => events.includes(event));
  return { received, hasEvents };
}

async function pubacks(url) {
  const nc = await connect({ servers: url });
  const js = jetstream(nc, { timeout: TIMEOUT_MS });
  const pubAcks = [];
  for (const msgID of ["first", "second", "first"]) {
    const ack = await js.publish("kept.confirmed.js", "x", { msgID });
    pubAcks.push([ack.stream, ack.seq, ack.duplicate]);
  }
  const otherStream = { expect: { streamName: "others" } };
  const error = await js.publish("kept.confirmed.js", "x", otherStream).catch((error) => error);
  await nc.close();
  return { pubAcks, code: error.code, refused: error.message.split(":")[0] };
}

async function denied(url, user, pass) {
  const connectError = await errorName(connect({ servers: url, user, pass: "wrong" }));
  const nc = await connect({ servers: url, user, pass });
  const subscription = nc.subscribe("not.yours");
  const subscribeError = await errorName(receive(subscription, 1));
  const events = [];
  const reported = new Promise((resolve) => {
    (async () => {
      for await (const status of nc.status()) {
        events.push(status.error?.message ?? status.type);
        resolve();
      }
    })();
  });
  nc.publish("not.yours", "x");
  await reported;
  const isOpen = !nc.isClosed();
  await nc.close();
  return { connectError, subscribeError, publishError: events[0], isOpen };
}

async function tls(url, token, caFile, certFile, keyFile) {
  const nc = await connect({ servers: url, token, tls: { caFile, certFile, keyFile } });
  const subscription = nc.subscribe("js.certified");
  nc.publish("js.certified", new Uint8Array(65536));
  const [message] = await receive(subscription, 1);
  const isRequired = nc.info.tls_required;
  await nc.close();
  return { length: message.data.length, isRequired };
}

const [mode, ...args] = process.argv.slice(2);
const modes = { acks, all, denied, pubacks, reconnect, tls };
console.log(JSON.stringify(await modes[mode](...args)));
