using System;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <content>Requests: classes, subscriptions, and the barrier for acks.</content>
    internal sealed partial class BusConnection
    {
        /// <summary>Return the id of a class. The server creates one that does not exist.</summary>
        public async ValueTask<ushort> ResolveAsync(ClassReference target, CancellationToken cancellationToken)
        {
            if (_classes.TryGetId(target, out ushort id))
                return id;
            ByteWriter content = new ByteWriter();
            ConnectRequest.WriteClasses(content, new[] { target });
            OpenRequest request = StartRequest(FrameType.Connect, 0, content.WrittenSpan.ToArray());
            await WaitAsync(new ValueTask<ReadOnlyMemory<byte>>(request.Reply), cancellationToken).ConfigureAwait(false);
            if (target.Name == null)
                _classes.Add(target, (ushort)target.Id!.Value);
            // The reader has added the id of a name.
            return _classes.TryGetId(target, out id)
                ? id : throw new FormatException($"the ConnectReply has no id of class {target}");
        }

        /// <summary>Subscribe to a class, and wait for the reply.</summary>
        /// <exception cref="RefusedException">The server refuses the subscription.</exception>
        public async Task<Inbox> SubscribeAsync(
            ClassReference target, SubscribeRequest options, bool isAutoAck, CancellationToken cancellationToken)
        {
            ushort classId = await ResolveAsync(target, cancellationToken).ConfigureAwait(false);
            Inbox inbox;
            Session? session;
            lock (_lock)
            {
                CheckOpen();
                inbox = new Inbox(this, classId, NextSubscriptionNumber(), options, isAutoAck);
                _inboxes.Add(inbox.Number, inbox);
                if (_session != null)
                    SendSubscribe(inbox);
                session = TryBeginWriting();
            }
            StartWriting(session, true);
            try
            {
                await WaitAsync(new ValueTask<bool>(inbox.WhenSubscribed.Task), cancellationToken).ConfigureAwait(false);
            }
            catch
            {
                await UnsubscribeAsync(inbox).ConfigureAwait(false);
                throw;
            }
            return inbox;
        }

        /// <summary>End a subscription. Messages that are not acknowledged return to the server.</summary>
        public async Task UnsubscribeAsync(Inbox inbox)
        {
            OpenRequest? request = null;
            Session? session;
            lock (_lock)
            {
                if (_inboxes.Remove(inbox.Number))
                {
                    if (_session != null)
                    {
                        inbox.ReturnUnread();
                        inbox.WriteAcks(_control);
                        request = AddRequest(FrameType.Unsubscribe, Array.Empty<byte>());
                        SendRequest(request, inbox.Number, 0);
                    }
                    _droppedAckCount += inbox.PendingAckCount; // Zero if the subscription was active.
                }
                session = TryBeginWriting();
            }
            StartWriting(session, true);
            inbox.End(null);
            if (request == null)
                return;
            try
            {
                await request.Reply.ConfigureAwait(false);
            }
            catch (BusException)
            {
                // The subscription ended in another way.
            }
        }

        /// <summary>Wait until the server has stored the acks so far.</summary>
        public async Task SyncAcksAsync(CancellationToken cancellationToken)
        {
            SendAcks();
            OpenRequest request = StartRequest(
                FrameType.Inquire, 0, System.Text.Encoding.UTF8.GetBytes("{\"about\":\"acks\"}"));
            try
            {
                await WaitAsync(new ValueTask<ReadOnlyMemory<byte>>(request.Reply), cancellationToken)
                    .ConfigureAwait(false);
            }
            catch (RefusedException)
            {
                // A server that stores acks in a cluster refuses the request.
            }
        }

        /// <summary>Send the acks soon, together with those of the next moment.</summary>
        public void ScheduleAcks()
        {
            if (Interlocked.Exchange(ref _isAckTimerArmed, 1) == 0)
            {
                try
                {
                    _ackTimer.Change(AckDelayMilliseconds, Timeout.Infinite);
                }
                catch (ObjectDisposedException)
                {
                    // The bus is closed.
                }
            }
        }

        /// <summary>Send all pending acks now.</summary>
        public void SendAcks()
        {
            Volatile.Write(ref _isAckTimerArmed, 0);
            Session? session;
            lock (_lock)
            {
                _areAcksDue = true;
                session = TryBeginWriting();
            }
            StartWriting(session, true);
        }

        private OpenRequest StartRequest(byte type, ushort a, byte[] content)
        {
            OpenRequest request;
            Session? session;
            lock (_lock)
            {
                CheckOpen();
                request = AddRequest(type, content);
                if (_session != null)
                    SendRequest(request, a, 0);
                session = TryBeginWriting();
            }
            StartWriting(session, true);
            return request;
        }

        private OpenRequest AddRequest(byte type, byte[] content)
        {
            _lastRequestNumber = (_lastRequestNumber + 1) & Frame.IdMask;
            OpenRequest request = new OpenRequest(_lastRequestNumber, type, content);
            _requests.Add(request.Number, request);
            return request;
        }

        private void SendRequest(OpenRequest request, ushort a, ushort c) =>
            Frame.Append(_control, request.Type, a, request.Number, c, request.Content);

        private void SendSubscribe(Inbox inbox)
        {
            OpenRequest request = AddRequest(FrameType.Subscribe, inbox.WriteSubscribe(_bus));
            inbox.SubscribeNumber = request.Number;
            SendRequest(request, inbox.ClassId, inbox.Number);
        }

        /// <summary>Subscribe again a moment after the durable was still in use.</summary>
        private async Task RetrySubscribeAsync(Inbox inbox, uint refusedNumber, TimeSpan delay)
        {
            await Task.Delay(delay).ConfigureAwait(false);
            Session? session;
            lock (_lock)
            {
                // After a reconnect, another Subscribe was sent already.
                if (_session != null && _inboxes.ContainsKey(inbox.Number) && inbox.SubscribeNumber == refusedNumber)
                    SendSubscribe(inbox);
                session = TryBeginWriting();
            }
            StartWriting(session, false);
        }

        private ushort NextSubscriptionNumber()
        {
            for (int tries = 0; tries < SubscriptionsMax; tries++)
            {
                _lastSubscriptionNumber = _lastSubscriptionNumber == SubscriptionsMax
                    ? (ushort)1 : (ushort)(_lastSubscriptionNumber + 1);
                if (!_inboxes.ContainsKey(_lastSubscriptionNumber))
                    return _lastSubscriptionNumber;
            }
            throw new InvalidOperationException($"a bus has at most {SubscriptionsMax} subscriptions");
        }
    }
}
