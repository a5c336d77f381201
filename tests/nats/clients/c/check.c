/* Test program of the client library nats.c. Prints its results as one line of JSON, which the
 * Python test compares with the expected results.
 *
 *     check all URL          publish, subscribe, queue groups and requests
 *     check reconnect URL    prints "ready", waits for a restart of the server, and continues
 *     check pubacks URL      PubAcks of a class
 */
#include <nats/nats.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TIMEOUT_MS = 60000, MEMBER_COUNT = 3, MESSAGE_COUNT = 300, PAYLOAD_BYTES_MAX = 1 << 20 };

static const char *url;

/* Ends the program with the line, the call and the error, unless the status is NATS_OK. */
static void expect_at(natsStatus status, const char *what, int line) {
    if (status == NATS_OK) return;
    fprintf(stderr, "line %d: %s: %s\n", line, what, natsStatus_GetText(status));
    nats_PrintLastErrorStack(stderr);
    exit(1);
}

#define expect(call) expect_at((call), #call, __LINE__)

static natsOptions *create_options(void) {
    natsOptions *options;
    expect(natsOptions_Create(&options));
    expect(natsOptions_SetURL(options, url));
    expect(natsOptions_SetTimeout(options, TIMEOUT_MS));
    return options;
}

static natsConnection *open_connection(void) {
    natsConnection *connection;
    natsOptions *options = create_options();
    expect(natsConnection_Connect(&connection, options));
    natsOptions_Destroy(options);
    return connection;
}

/* A count that one thread increments and another waits for. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int count;
} Counter;

#define COUNTER {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0}

static void increment(Counter *counter) {
    pthread_mutex_lock(&counter->lock);
    counter->count += 1;
    pthread_cond_broadcast(&counter->changed);
    pthread_mutex_unlock(&counter->lock);
}

static void wait_for(Counter *counter, int count) {
    pthread_mutex_lock(&counter->lock);
    while (counter->count < count) pthread_cond_wait(&counter->changed, &counter->lock);
    pthread_mutex_unlock(&counter->lock);
}

/* ---- publish and subscribe ---- */

typedef struct {
    Counter received;
    int invalid_count;
} Received;

/* Checks the next message. Message n has n bytes with the value n. */
static void check_message(natsConnection *connection, natsSubscription *from, natsMsg *message,
                          void *data) {
    Received *result = data;
    int n = result->received.count, size = natsMsg_GetDataLength(message);
    const char *payload = natsMsg_GetData(message);
    result->invalid_count +=
        size != n || (size > 0 && (payload[0] != (char)n || payload[size - 1] != (char)n));
    result->invalid_count += strcmp(natsMsg_GetSubject(message), "c.plain.it") != 0;
    natsMsg_Destroy(message);
    increment(&result->received);
    (void)connection, (void)from;
}

static void check_publish(void) {
    static Received result = {COUNTER, 0};
    static char payload[256], longest[PAYLOAD_BYTES_MAX];
    natsConnection *publisher = open_connection(), *subscriber = open_connection();
    natsSubscription *with_callback, *synchronous;
    natsMsg *message;
    expect(natsConnection_Subscribe(&with_callback, subscriber, "c.plain.*", check_message,
                                    &result));
    expect(natsConnection_SubscribeSync(&synchronous, subscriber, "c.long"));
    expect(natsConnection_Flush(subscriber));
    for (int n = 0; n < 256; n++) {
        memset(payload, n, sizeof payload);
        expect(natsConnection_Publish(publisher, "c.plain.it", payload, n));
    }
    expect(natsConnection_Publish(publisher, "c.long", longest, PAYLOAD_BYTES_MAX));
    natsStatus too_long =
        natsConnection_Publish(publisher, "c.long", longest, PAYLOAD_BYTES_MAX + 1);
    expect(natsSubscription_NextMsg(&message, synchronous, TIMEOUT_MS));
    wait_for(&result.received, 256);
    printf("\"publish\": {\"received\": %d, \"invalid\": %d, \"longest\": %d, \"too_long\": \"%s\"}, ",
           result.received.count, result.invalid_count, natsMsg_GetDataLength(message),
           natsStatus_GetText(too_long));
    natsMsg_Destroy(message);
    natsSubscription_Destroy(with_callback);
    natsSubscription_Destroy(synchronous);
    natsConnection_Destroy(publisher);
    natsConnection_Destroy(subscriber);
}

static void check_auto_unsubscribe(void) {
    natsConnection *connection = open_connection();
    natsSubscription *subscription;
    natsMsg *message;
    expect(natsConnection_SubscribeSync(&subscription, connection, "c.limited"));
    expect(natsSubscription_AutoUnsubscribe(subscription, 2));
    for (int n = 0; n < 4; n++)
        expect(natsConnection_PublishString(connection, "c.limited", n % 2 ? "odd" : "even"));
    expect(natsConnection_Flush(connection));
    for (int n = 0; n < 2; n++) {
        expect(natsSubscription_NextMsg(&message, subscription, TIMEOUT_MS));
        natsMsg_Destroy(message);
    }
    natsStatus ended = natsSubscription_NextMsg(&message, subscription, TIMEOUT_MS);
    printf("\"auto_unsubscribe\": \"%s\", ", natsStatus_GetText(ended));
    natsSubscription_Destroy(subscription);
    natsConnection_Destroy(connection);
}

/* ---- queue groups ---- */

static Counter group_received = COUNTER;
static int payload_sum;

static void count_message(natsConnection *connection, natsSubscription *from, natsMsg *message,
                          void *data) {
    *(int *)data += 1;
    __atomic_fetch_add(&payload_sum, atoi(natsMsg_GetData(message)), __ATOMIC_SEQ_CST);
    natsMsg_Destroy(message);
    increment(&group_received);
    (void)connection, (void)from;
}

static void check_queue_group(void) {
    natsConnection *members[MEMBER_COUNT];
    natsSubscription *subscriptions[MEMBER_COUNT];
    int received[MEMBER_COUNT] = {0};
    for (int i = 0; i < MEMBER_COUNT; i++) {
        members[i] = open_connection();
        expect(natsConnection_QueueSubscribe(&subscriptions[i], members[i], "c.queue", "workers",
                                             count_message, &received[i]));
        expect(natsConnection_Flush(members[i]));
    }
    for (int n = 0; n < MESSAGE_COUNT; n++) {
        char number[16];
        snprintf(number, sizeof number, "%d", n);
        expect(natsConnection_PublishString(members[0], "c.queue", number));
    }
    wait_for(&group_received, MESSAGE_COUNT);
    for (int i = 0; i < MEMBER_COUNT; i++) {
        expect(natsConnection_Drain(members[i]));
        while (!natsConnection_IsClosed(members[i])) nats_Sleep(1);
    }
    bool have_all_received = received[0] > 0 && received[1] > 0 && received[2] > 0;
    printf("\"queue_group\": {\"received\": %d, \"sum\": %d, \"have_all_received\": %s}, ",
           group_received.count, payload_sum, have_all_received ? "true" : "false");
    for (int i = 0; i < MEMBER_COUNT; i++) {
        natsSubscription_Destroy(subscriptions[i]);
        natsConnection_Destroy(members[i]);
    }
}

/* ---- requests and headers ---- */

static void reply_to(natsConnection *connection, natsSubscription *from, natsMsg *message,
                     void *data) {
    const char *value = NULL;
    natsMsg *reply;
    natsMsgHeader_Get(message, "Request-Header", &value);
    expect(natsMsg_Create(&reply, natsMsg_GetReply(message), NULL, natsMsg_GetData(message),
                          natsMsg_GetDataLength(message)));
    expect(natsMsgHeader_Set(reply, "Reply-Header", value ? value : "none"));
    expect(natsConnection_PublishMsg(connection, reply));
    natsMsg_Destroy(reply);
    natsMsg_Destroy(message);
    (void)from, (void)data;
}

static void check_requests(void) {
    natsConnection *server = open_connection(), *client = open_connection();
    natsSubscription *subscription, *silent;
    natsMsg *request, *reply, *none = NULL;
    const char *reply_header = NULL;
    expect(natsConnection_Subscribe(&subscription, server, "c.request", reply_to, NULL));
    expect(natsConnection_SubscribeSync(&silent, server, "c.silent"));
    expect(natsConnection_Flush(server));
    expect(natsMsg_Create(&request, "c.request", NULL, "\r\n", 2));
    expect(natsMsgHeader_Set(request, "Request-Header", "a:b"));
    expect(natsConnection_RequestMsg(&reply, client, request, TIMEOUT_MS));
    expect(natsMsgHeader_Get(reply, "Reply-Header", &reply_header));
    natsStatus no_responders =
        natsConnection_RequestString(&none, client, "c.nobody", "?", TIMEOUT_MS);
    natsStatus timeout = natsConnection_RequestString(&none, client, "c.silent", "?", 50);
    printf("\"requests\": {\"size\": %d, \"header\": \"%s\", \"no_responders\": \"%s\", "
           "\"timeout\": \"%s\"}",
           natsMsg_GetDataLength(reply), reply_header, natsStatus_GetText(no_responders),
           natsStatus_GetText(timeout));
    natsMsg_Destroy(request);
    natsMsg_Destroy(reply);
    natsSubscription_Destroy(subscription);
    natsSubscription_Destroy(silent);
    natsConnection_Destroy(server);
    natsConnection_Destroy(client);
}

/* ---- reconnect ---- */

static Counter disconnects = COUNTER, reconnects = COUNTER;

static void count_event(natsConnection *connection, void *data) {
    increment(data);
    (void)connection;
}

static void check_reconnect(void) {
    natsConnection *connection;
    natsSubscription *subscription;
    natsOptions *options = create_options();
    expect(natsOptions_SetReconnectWait(options, 20));
    expect(natsOptions_SetReconnectJitter(options, 5, 5));
    expect(natsOptions_SetMaxReconnect(options, -1));
    expect(natsOptions_SetDisconnectedCB(options, count_event, &disconnects));
    expect(natsOptions_SetReconnectedCB(options, count_event, &reconnects));
    expect(natsConnection_Connect(&connection, options));
    natsOptions_Destroy(options);
    expect(natsConnection_SubscribeSync(&subscription, connection, "c.reconnect"));
    expect(natsConnection_Flush(connection));
    printf("ready\n");
    fflush(stdout);
    wait_for(&disconnects, 1);
    expect(natsConnection_PublishString(connection, "c.reconnect", "before reconnect"));
    wait_for(&reconnects, 1);
    expect(natsConnection_PublishString(connection, "c.reconnect", "after reconnect"));
    printf("{\"received\": [");
    for (int n = 0; n < 2; n++) {
        natsMsg *message;
        expect(natsSubscription_NextMsg(&message, subscription, TIMEOUT_MS));
        printf("%s\"%s\"", n ? ", " : "", natsMsg_GetData(message));
        natsMsg_Destroy(message);
    }
    printf("]}\n");
    natsSubscription_Destroy(subscription);
    natsConnection_Destroy(connection);
}

/* ---- PubAcks ---- */

static void check_pub_acks(void) {
    const char *ids[] = {"first", "second", "first"};
    natsConnection *connection = open_connection();
    jsCtx *js;
    jsPubAck *ack;
    jsErrCode code = 0;
    jsPubOptions publish_options;
    expect(natsConnection_JetStream(&js, connection, NULL));
    printf("{\"pub_acks\": [");
    for (int n = 0; n < 3; n++) {
        expect(jsPubOptions_Init(&publish_options));
        publish_options.MsgId = ids[n];
        publish_options.MaxWait = TIMEOUT_MS;
        expect(js_Publish(&ack, js, "kept.confirmed.c", "x", 1, &publish_options, NULL));
        printf("%s[\"%s\", %d, %s]", n ? ", " : "", ack->Stream, (int)ack->Sequence,
               ack->Duplicate ? "true" : "false");
        jsPubAck_Destroy(ack);
    }
    expect(jsPubOptions_Init(&publish_options));
    publish_options.ExpectStream = "others";
    publish_options.MaxWait = TIMEOUT_MS;
    js_Publish(&ack, js, "kept.confirmed.c", "x", 1, &publish_options, &code);
    printf("], \"code\": %d}\n", (int)code);
    jsCtx_Destroy(js);
    natsConnection_Destroy(connection);
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: check all|reconnect|pubacks URL\n");
        return 2;
    }
    url = words[2];
    expect(nats_Open(-1));
    if (strcmp(words[1], "reconnect") == 0) {
        check_reconnect();
    } else if (strcmp(words[1], "pubacks") == 0) {
        check_pub_acks();
    } else {
        printf("{");
        check_publish();
        check_auto_unsubscribe();
        check_queue_group();
        check_requests();
        printf("}\n");
    }
    nats_CloseAndWait(TIMEOUT_MS);
    return 0;
}
