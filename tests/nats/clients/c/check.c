/* nats.c as its users use it. Prints one line of JSON: what came of each thing that it tried.
 *
 *     check all URL      everything on an open server
 *     check again URL    says "ready", waits for a restart, and goes on
 *     check confirmed URL    PubAcks of a class
 *
 * Rule 1: little is judged here. What comes out is compared by the test that runs it.
 */
#include <nats/nats.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_MS = 60000, MEMBERS = 3, QUEUED = 300, LONG = 1 << 20 };

static const char *url;

/* Ends the program with the place and the reason, unless all is well. */
static void expect_at(natsStatus status, const char *what, int line) {
    if (status == NATS_OK) return;
    fprintf(stderr, "line %d: %s: %s\n", line, what, natsStatus_GetText(status));
    nats_PrintLastErrorStack(stderr);
    exit(1);
}

#define expect(call) expect_at((call), #call, __LINE__)

static natsOptions *options(void) {
    natsOptions *made;
    expect(natsOptions_Create(&made));
    expect(natsOptions_SetURL(made, url));
    expect(natsOptions_SetTimeout(made, PATIENCE_MS));
    return made;
}

static natsConnection *connected(void) {
    natsConnection *connection;
    natsOptions *made = options();
    expect(natsConnection_Connect(&connection, made));
    natsOptions_Destroy(made);
    return connection;
}

/* A count that one thread raises and another waits for. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t raised;
    int count;
} Counter;

#define COUNTER {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0}

static void raise_count(Counter *counter) {
    pthread_mutex_lock(&counter->lock);
    counter->count += 1;
    pthread_cond_broadcast(&counter->raised);
    pthread_mutex_unlock(&counter->lock);
}

static void wait_for(Counter *counter, int count) {
    pthread_mutex_lock(&counter->lock);
    while (counter->count < count) pthread_cond_wait(&counter->raised, &counter->lock);
    pthread_mutex_unlock(&counter->lock);
}

/* ---- publish and subscribe ---- */

typedef struct {
    Counter came;
    int wrong;
} Heard;

/* Message n is n bytes of the letter n. */
static void hear(natsConnection *connection, natsSubscription *from, natsMsg *message, void *data) {
    Heard *heard = data;
    int n = heard->came.count, size = natsMsg_GetDataLength(message);
    const char *payload = natsMsg_GetData(message);
    heard->wrong += size != n || (size > 0 && (payload[0] != (char)n || payload[size - 1] != (char)n));
    heard->wrong += strcmp(natsMsg_GetSubject(message), "c.plain.it") != 0;
    natsMsg_Destroy(message);
    raise_count(&heard->came);
    (void)connection, (void)from;
}

static void plain(void) {
    static Heard heard = {COUNTER, 0};
    static char payload[256], longest[LONG];
    natsConnection *publisher = connected(), *subscriber = connected();
    natsSubscription *called, *asked;
    natsMsg *message;
    expect(natsConnection_Subscribe(&called, subscriber, "c.plain.*", hear, &heard));
    expect(natsConnection_SubscribeSync(&asked, subscriber, "c.long"));
    expect(natsConnection_Flush(subscriber));
    for (int n = 0; n < 256; n++) {
        memset(payload, n, sizeof payload);
        expect(natsConnection_Publish(publisher, "c.plain.it", payload, n));
    }
    expect(natsConnection_Publish(publisher, "c.long", longest, LONG));
    natsStatus longer = natsConnection_Publish(publisher, "c.long", longest, LONG + 1);
    expect(natsSubscription_NextMsg(&message, asked, PATIENCE_MS));
    wait_for(&heard.came, 256);
    printf("\"plain\": {\"came\": %d, \"wrong\": %d, \"long\": %d, \"too_long\": \"%s\"}, ",
           heard.came.count, heard.wrong, natsMsg_GetDataLength(message),
           natsStatus_GetText(longer));
    natsMsg_Destroy(message);
    natsSubscription_Destroy(called);
    natsSubscription_Destroy(asked);
    natsConnection_Destroy(publisher);
    natsConnection_Destroy(subscriber);
}

static void limited(void) {
    natsConnection *connection = connected();
    natsSubscription *subscription;
    natsMsg *message;
    expect(natsConnection_SubscribeSync(&subscription, connection, "c.limited"));
    expect(natsSubscription_AutoUnsubscribe(subscription, 2));
    for (int n = 0; n < 4; n++)
        expect(natsConnection_PublishString(connection, "c.limited", n % 2 ? "odd" : "even"));
    expect(natsConnection_Flush(connection));
    for (int n = 0; n < 2; n++) {
        expect(natsSubscription_NextMsg(&message, subscription, PATIENCE_MS));
        natsMsg_Destroy(message);
    }
    natsStatus ended = natsSubscription_NextMsg(&message, subscription, PATIENCE_MS);
    printf("\"limited\": \"%s\", ", natsStatus_GetText(ended));
    natsSubscription_Destroy(subscription);
    natsConnection_Destroy(connection);
}

/* ---- queue groups ---- */

static Counter queued = COUNTER;
static int sum;

static void work(natsConnection *connection, natsSubscription *from, natsMsg *message, void *data) {
    *(int *)data += 1;
    __atomic_fetch_add(&sum, atoi(natsMsg_GetData(message)), __ATOMIC_SEQ_CST);
    natsMsg_Destroy(message);
    raise_count(&queued);
    (void)connection, (void)from;
}

static void queue(void) {
    natsConnection *members[MEMBERS];
    natsSubscription *subscriptions[MEMBERS];
    int taken[MEMBERS] = {0};
    for (int i = 0; i < MEMBERS; i++) {
        members[i] = connected();
        expect(natsConnection_QueueSubscribe(&subscriptions[i], members[i], "c.queue", "workers",
                                             work, &taken[i]));
        expect(natsConnection_Flush(members[i]));
    }
    for (int n = 0; n < QUEUED; n++) {
        char number[16];
        snprintf(number, sizeof number, "%d", n);
        expect(natsConnection_PublishString(members[0], "c.queue", number));
    }
    wait_for(&queued, QUEUED);
    for (int i = 0; i < MEMBERS; i++) {
        expect(natsConnection_Drain(members[i]));
        while (!natsConnection_IsClosed(members[i])) nats_Sleep(1);
    }
    printf("\"queue\": {\"taken\": %d, \"sum\": %d, \"everybody\": %s}, ", queued.count, sum,
           taken[0] > 0 && taken[1] > 0 && taken[2] > 0 ? "true" : "false");
    for (int i = 0; i < MEMBERS; i++) {
        natsSubscription_Destroy(subscriptions[i]);
        natsConnection_Destroy(members[i]);
    }
}

/* ---- requests and headers ---- */

static void answer(natsConnection *connection, natsSubscription *from, natsMsg *message,
                   void *data) {
    const char *asked = NULL;
    natsMsg *reply;
    natsMsgHeader_Get(message, "Asked", &asked);
    expect(natsMsg_Create(&reply, natsMsg_GetReply(message), NULL, natsMsg_GetData(message),
                          natsMsg_GetDataLength(message)));
    expect(natsMsgHeader_Set(reply, "Answered", asked ? asked : "nothing"));
    expect(natsConnection_PublishMsg(connection, reply));
    natsMsg_Destroy(reply);
    natsMsg_Destroy(message);
    (void)from, (void)data;
}

static void requests(void) {
    natsConnection *server = connected(), *client = connected();
    natsSubscription *subscription, *silent;
    natsMsg *asked, *reply, *none = NULL;
    const char *answered = NULL;
    expect(natsConnection_Subscribe(&subscription, server, "c.answer", answer, NULL));
    expect(natsConnection_SubscribeSync(&silent, server, "c.silent"));
    expect(natsConnection_Flush(server));
    expect(natsMsg_Create(&asked, "c.answer", NULL, "\r\n", 2));
    expect(natsMsgHeader_Set(asked, "Asked", "a:b"));
    expect(natsConnection_RequestMsg(&reply, client, asked, PATIENCE_MS));
    expect(natsMsgHeader_Get(reply, "Answered", &answered));
    natsStatus nobody = natsConnection_RequestString(&none, client, "c.nobody", "?", PATIENCE_MS);
    natsStatus late = natsConnection_RequestString(&none, client, "c.silent", "?", 50);
    printf("\"requests\": {\"size\": %d, \"answered\": \"%s\", \"nobody\": \"%s\", \"late\": \"%s\"}",
           natsMsg_GetDataLength(reply), answered, natsStatus_GetText(nobody),
           natsStatus_GetText(late));
    natsMsg_Destroy(asked);
    natsMsg_Destroy(reply);
    natsSubscription_Destroy(subscription);
    natsSubscription_Destroy(silent);
    natsConnection_Destroy(server);
    natsConnection_Destroy(client);
}

/* ---- over a restart ---- */

static Counter lost = COUNTER, found = COUNTER;

static void note(natsConnection *connection, void *data) {
    raise_count(data);
    (void)connection;
}

static void again(void) {
    natsConnection *connection;
    natsSubscription *subscription;
    natsOptions *made = options();
    expect(natsOptions_SetReconnectWait(made, 20));
    expect(natsOptions_SetReconnectJitter(made, 5, 5));
    expect(natsOptions_SetMaxReconnect(made, -1));
    expect(natsOptions_SetDisconnectedCB(made, note, &lost));
    expect(natsOptions_SetReconnectedCB(made, note, &found));
    expect(natsConnection_Connect(&connection, made));
    natsOptions_Destroy(made);
    expect(natsConnection_SubscribeSync(&subscription, connection, "c.again"));
    expect(natsConnection_Flush(connection));
    printf("ready\n");
    fflush(stdout);
    wait_for(&lost, 1);
    expect(natsConnection_PublishString(connection, "c.again", "meanwhile"));
    wait_for(&found, 1);
    expect(natsConnection_PublishString(connection, "c.again", "after"));
    printf("{\"found\": [");
    for (int n = 0; n < 2; n++) {
        natsMsg *message;
        expect(natsSubscription_NextMsg(&message, subscription, PATIENCE_MS));
        printf("%s\"%s\"", n ? ", " : "", natsMsg_GetData(message));
        natsMsg_Destroy(message);
    }
    printf("]}\n");
    natsSubscription_Destroy(subscription);
    natsConnection_Destroy(connection);
}

/* ---- PubAcks ---- */

static void confirmed(void) {
    const char *ids[] = {"first", "second", "first"};
    natsConnection *connection = connected();
    jsCtx *js;
    jsPubAck *ack;
    jsErrCode code = 0;
    jsPubOptions wanted;
    expect(natsConnection_JetStream(&js, connection, NULL));
    printf("{\"found\": [");
    for (int n = 0; n < 3; n++) {
        expect(jsPubOptions_Init(&wanted));
        wanted.MsgId = ids[n];
        wanted.MaxWait = PATIENCE_MS;
        expect(js_Publish(&ack, js, "kept.confirmed.c", "x", 1, &wanted, NULL));
        printf("%s[\"%s\", %d, %s]", n ? ", " : "", ack->Stream, (int)ack->Sequence,
               ack->Duplicate ? "true" : "false");
        jsPubAck_Destroy(ack);
    }
    expect(jsPubOptions_Init(&wanted));
    wanted.ExpectStream = "others";
    wanted.MaxWait = PATIENCE_MS;
    js_Publish(&ack, js, "kept.confirmed.c", "x", 1, &wanted, &code);
    printf("], \"code\": %d}\n", (int)code);
    jsCtx_Destroy(js);
    natsConnection_Destroy(connection);
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: check all|again|confirmed URL\n");
        return 2;
    }
    url = words[2];
    expect(nats_Open(-1));
    if (strcmp(words[1], "again") == 0) {
        again();
    } else if (strcmp(words[1], "confirmed") == 0) {
        confirmed();
    } else {
        printf("{");
        plain();
        limited();
        queue();
        requests();
        printf("}\n");
    }
    nats_CloseAndWait(PATIENCE_MS);
    return 0;
}
