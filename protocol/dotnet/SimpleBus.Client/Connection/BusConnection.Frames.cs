using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <content>Frames: the reader and the writer of a connection.</content>
    internal sealed partial class BusConnection
    {
        // Reading ---------------------------------------------------------------------------------

        /// <summary>Process what a server sends until the connection ends. Return why.</summary>
        private async Task<Exception> ServeAsync(Session session)
        {
            using Timer? heartbeat = StartHeartbeat(session);
            _batch.Reset();
            try
            {
                while (true)
                {
                    ProcessFrames(session);
                    await session.ReadAsync().ConfigureAwait(false);
                }
            }
            catch (Exception error)
            {
                return session.FirstError(error);
            }
        }

        private void ProcessFrames(Session session)
        {
            ReceiveBuffer buffer = session.Buffer;
            while (buffer.TryReadFrame(out Frame frame))
            {
                if (frame.IsMessage)
                {
                    _batch.Add(frame);
                    continue;
                }
                if (frame.Type == FrameType.Deliver)
                {
                    DeliverBatch(buffer);
                    _batch.SetDelivery(frame);
                    continue;
                }
                if (frame.Type == FrameType.Confirm)
                {
                    lock (_lock)
                    {
                        _level = (Durability)Math.Min((int)frame.C, (int)Durability.Disk);
                        _publishBuffer.Confirm(frame.B & Frame.IdMask);
                        Confirmed();
                    }
                    continue;
                }
                if (frame.Type == FrameType.Heartbeat)
                    continue;
                DeliverBatch(buffer);
                ProcessReply(session, frame, buffer.Bytes.AsMemory(frame.ContentOffset, frame.ContentLength));
            }
            DeliverBatch(buffer);
            Session? writing;
            lock (_lock)
                writing = TryBeginWriting(); // Confirms may have given credit.
            StartWriting(writing, true);
        }

        private void DeliverBatch(ReceiveBuffer buffer)
        {
            if (_batch.IsEmpty)
                return;
            Inbox? inbox;
            lock (_lock)
                _inboxes.TryGetValue(_batch.Subscription, out inbox);
            if (inbox == null || inbox.ClassId != _batch.ClassId)
                _batch.Discard(); // The subscription has ended.
            else
                inbox.Accept(_batch.Build(buffer.Bytes));
        }

        private void ProcessReply(Session session, in Frame frame, ReadOnlyMemory<byte> content)
        {
            if (frame.Type == FrameType.Error)
            {
                ProcessError(session, frame, ErrorReply.Parse(content));
                return;
            }
            OpenRequest? request;
            Inbox? inbox = null;
            lock (_lock)
            {
                if (!_requests.TryGetValue(frame.B, out request) || request.Type != frame.Type)
                    return; // Frames of unknown types are ignored.
                _requests.Remove(frame.B);
                if (frame.Type == FrameType.Subscribe && _inboxes.TryGetValue(frame.C, out inbox)
                    && inbox.SubscribeNumber == frame.B)
                {
                    inbox.Subscribed(SubscribeReply.Parse(content), _bus, _run);
                    _areAcksDue = true; // Acks may have waited for the subscription.
                }
            }
            if (frame.Type == FrameType.Connect)
                foreach (KeyValuePair<string, ushort> named in ConnectReply.Parse(content).Classes)
                    _classes.Add(named.Key, named.Value);
            inbox?.WhenSubscribed.TrySetResult(true);
            request.SetReply(content.ToArray());
        }

        private void ProcessError(Session session, in Frame frame, ErrorReply error)
        {
            if (error.IsFatal)
                throw new BusConnectionException($"{error.Code}: {error.Message}", error.Code);
            switch (frame.C)
            {
                case FrameType.Message:
                case FrameType.Envelope:
                    lock (_lock)
                    {
                        long first = _publishBuffer.PositionOf(frame.B & Frame.IdMask);
                        if (first >= 0)
                            _confirms.Refuse(first, first + Math.Max(error.Count, 1) - 1, error.Code, error.Message);
                    }
                    return;
                case FrameType.Subscribe:
                    EndSubscription(frame.B, error);
                    return;
            }
            OpenRequest? request;
            lock (_lock)
            {
                session.IsDraining |= error.Code == "draining";
                if (_requests.TryGetValue(frame.B, out request) && request.Type == frame.C)
                    _requests.Remove(frame.B);
                else
                    request = null;
            }
            if (request != null)
                request.SetException(new RefusedException($"{error.Code}: {error.Message}", error.Code));
            else
                Log(BusLogLevel.Warning, $"the server reports {error.Code}: {error.Message}");
        }

        /// <summary>Handle an Error about a subscription: it was refused, or has ended.</summary>
        private void EndSubscription(uint requestNumber, ErrorReply error)
        {
            Inbox? found = null;
            bool isRetried;
            lock (_lock)
            {
                _requests.Remove(requestNumber);
                foreach (Inbox inbox in _inboxes.Values)
                    if (inbox.SubscribeNumber == requestNumber)
                        found = inbox;
                if (found == null)
                    return;
                // The server may not have noticed the end of the old connection.
                isRetried = error.Code == "durable_in_use" && found.WasSubscribed;
                if (!isRetried)
                    _inboxes.Remove(found.Number);
            }
            if (isRetried)
            {
                double seconds = ReconnectSchedule.DelaySeconds(found.RefusedRetryCount++, NextRandom());
                if (found.RefusedRetryCount == 3) // The old connection should have ended.
                    Log(BusLogLevel.Warning, $"retrying a lost subscription: {error.Code}: {error.Message}");
                _ = RetrySubscribeAsync(found, requestNumber, TimeSpan.FromSeconds(seconds));
                return;
            }
            RefusedException refusal = new RefusedException($"{error.Code}: {error.Message}", error.Code);
            found.WhenSubscribed.TrySetException(refusal);
            _ = found.WhenSubscribed.Task.Exception;
            found.End(refusal);
        }

        private Timer? StartHeartbeat(Session session)
        {
            double seconds = session.Reply.HeartbeatSeconds;
            if (seconds <= 0)
                return null;
            TimeSpan period = TimeSpan.FromSeconds(Math.Max(seconds / 4, 0.01));
            return new Timer(state => SendHeartbeat((Session)state!), session, period, period);
        }

        private void SendHeartbeat(Session session)
        {
            bool isDue;
            try
            {
                isDue = session.CheckHeartbeat();
            }
            catch (System.IO.IOException error)
            {
                session.Fail(error);
                return;
            }
            if (!isDue)
                return;
            Session? writing;
            lock (_lock)
            {
                if (_session == session && !session.IsWriting)
                    Frame.Append(_control, FrameType.Heartbeat, 0, 0, 0, default);
                writing = TryBeginWriting();
            }
            StartWriting(writing, false);
        }

        // Writing ---------------------------------------------------------------------------------

        /// <summary>Return the session to write to, or null if nothing is to be written or a write runs. Under the
        /// lock.</summary>
        private Session? TryBeginWriting()
        {
            if (_session == null || _session.IsWriting
                || !(_areAcksDue || _control.Count > 0 || (!_session.IsDraining && _publishBuffer.CanRelease)))
                return null;
            _session.BeginWriting();
            return _session;
        }

        /// <summary>Write to a session that <see cref="TryBeginWriting"/> returned. Not under the lock.</summary>
        /// <param name="session">The session; null to do nothing.</param>
        /// <param name="isInline">True to write in this call as far as the socket accepts it.</param>
        private void StartWriting(Session? session, bool isInline)
        {
            if (session == null)
                return;
            if (isInline)
                _ = WriteAsync(session);
            else
                ThreadPool.UnsafeQueueUserWorkItem(
                    state =>
                    {
                        (BusConnection connection, Session target) = ((BusConnection, Session))state!;
                        _ = connection.WriteAsync(target);
                    },
                    (this, session));
        }

        /// <summary>Write until there is nothing left. Never fails.</summary>
        private async Task WriteAsync(Session session)
        {
            PublishChunk? chunk = null;
            try
            {
                while (true)
                {
                    ReadOnlyMemory<byte> bytes;
                    lock (_lock)
                    {
                        if (chunk != null)
                            _publishBuffer.EndWrite(chunk);
                        chunk = null;
                        if (_session != session || !TryGetNextBytes(session, out bytes, out chunk))
                        {
                            session.EndWriting();
                            return;
                        }
                    }
                    await session.WriteAsync(bytes).ConfigureAwait(false);
                }
            }
            catch (Exception error)
            {
                session.Fail(error);
                lock (_lock)
                {
                    if (chunk != null)
                        _publishBuffer.EndWrite(chunk);
                    session.EndWriting();
                }
            }
        }

        /// <summary>Return the next bytes to write: acks and requests first, then messages. Under the lock.</summary>
        private bool TryGetNextBytes(Session session, out ReadOnlyMemory<byte> bytes, out PublishChunk? chunk)
        {
            chunk = null;
            if (_areAcksDue)
            {
                _areAcksDue = false;
                foreach (Inbox inbox in _inboxes.Values)
                    inbox.WriteAcks(_control);
            }
            if (_control.Count > 0)
            {
                (_control, _controlBeingWritten) = (_controlBeingWritten, _control);
                _control.Clear();
                bytes = _controlBeingWritten.WrittenMemory;
                return true;
            }
            bytes = default;
            return !session.IsDraining && _publishBuffer.TryRelease(out chunk, out bytes);
        }
    }
}
