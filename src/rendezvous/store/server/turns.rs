//! The turns of a client: reads what it asks for and carries it out.

use super::super::channels::{self, Frame};
use super::super::frame::{Malformed, Request};
use super::super::poll::Ready;
use super::super::table::{Client, Refusal};
use super::client::Admission;
use super::clients::{LEAST, MOST_READ, SMALL_SEND, Serving, WAKE};
use super::link::{Link, ReadOutcome};

/// The most work for one client in its trunk's turn. For more work the client gets turns of its
/// own.
const CHANNEL_TURN: usize = 16 << 10;

/// How much work a frame of a trunk counts beside its bytes.
const FRAME: usize = 512;

impl Serving {
    /// Does what one event asks for, up to that much work, and returns how much work it was.
    pub(super) fn small_turn(&mut self, event: &Ready, limit: usize) -> usize {
        match event.token {
            WAKE => 0,
            listener if listener < WAKE => {
                let before = self.next;
                self.accept(listener as usize);
                (self.next - before) as usize * LEAST
            }
            client => {
                if event.write {
                    // The client has more replies than a small turn sends, so it gets the rest in
                    // larger turns.
                    self.queue_turn(client);
                } else if event.read {
                    return self.turn(client, limit, true);
                } else if event.over {
                    self.leave(client);
                }
                0
            }
        }
    }

    /// Carries out what a client has asked for, and reads more, until its replies pile up or the
    /// work of its turn is done. A larger turn may begin with a request of any length. Returns how
    /// much work it was.
    pub(super) fn turn(&mut self, client: Client, limit: usize, is_small: bool) -> usize {
        let (mut work, mut readable) = (0, true);
        loop {
            let Some(connection) = self.clients.get_mut(&client) else { return work };
            if connection.ending {
                break;
            }
            if connection.is_backlogged() {
                if connection.has_ended() {
                    // Nobody takes the replies any more.
                    self.leave(client);
                    return work;
                }
                break;
            }
            if work >= limit {
                if readable || connection.has_more() {
                    self.queue_turn(client);
                }
                break;
            }
            let done = if connection.task.is_some() {
                if is_small && limit <= LEAST {
                    // A step is more than such a turn may do.
                    self.queue_turn(client);
                    break;
                }
                self.advance(client)
            } else {
                match connection.measure() {
                    // The request is too long for the rest of this turn.
                    Ok(Some(length)) if (work > 0 || is_small) && work + connection.work_of_request(length) > limit => {
                        self.queue_turn(client);
                        break;
                    }
                    Ok(Some(length)) if connection.trunk.is_some() => {
                        self.frame(client, length, limit.saturating_sub(work))
                    }
                    Ok(Some(length)) => self.request(client, length, is_small && limit <= LEAST),
                    Ok(None) if !readable => break,
                    Ok(None) => {
                        let most = (limit / connection.work_of_byte()).min(MOST_READ);
                        match connection.read(&mut self.buffer[..most]) {
                            ReadOutcome::Bytes(count) => {
                                work += count * connection.work_of_byte();
                                // Nothing tells of the end of a channel again, so it is read at
                                // once.
                                readable = count == most || matches!(connection.link, Link::Channel(_));
                                let was_admitted = connection.is_admitted();
                                let received = connection.receive(&self.buffer[..count]);
                                if !was_admitted && connection.is_admitted() {
                                    self.connections.admitted(client);
                                }
                                received.map_err(|malformed| Refusal::Protocol(malformed.0))
                            }
                            ReadOutcome::Nothing => break,
                            ReadOutcome::End => {
                                self.leave(client);
                                return work;
                            }
                        }
                    }
                    Err(malformed) => Err(Refusal::Protocol(malformed.0)),
                }
            };
            work += self.table.take_work() + self.answer(client);
            if let Err(refusal) = done {
                if let (Refusal::TurnedAway(said), Some(connection)) = (refusal, self.clients.get(&client)) {
                    self.table.note_turned_away(connection.nonce, said);
                }
                self.leave(client);
                return work;
            }
        }
        work + self.flush(client, SMALL_SEND.min(limit))
    }

    /// Does what the next frame of a trunk says. With its header the frame has `length` bytes. The
    /// client of the channel gets a small turn. The work of this client counts for the trunk, whose
    /// turn has `limit` units left.
    fn frame(&mut self, trunk: Client, length: usize, limit: usize) -> Result<(), Refusal> {
        let Some(connection) = self.clients.get_mut(&trunk) else { return Ok(()) };
        let bytes = connection.take_frame(length);
        self.table.count_work(FRAME + length);
        let Some((number, frame)) = channels::frame(&bytes) else { return Ok(()) };
        let known = connection.trunk.as_ref().and_then(|trunk| trunk.channels.get(&number)).copied();
        let Some(client) = known else {
            // The server may have ended the channel before it got another frame.
            if frame == Frame::Begins {
                self.open_channel(trunk, number);
            }
            return Ok(());
        };
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        let Link::Channel(channel) = &mut connection.link else { return Ok(()) };
        let protocol = |malformed: Malformed| Refusal::Protocol(malformed.0);
        match frame {
            Frame::Bytes(bytes) => channel.receive(bytes).map_err(protocol)?,
            Frame::Taken(count) => {
                channel.window.widen(count).map_err(protocol)?;
                if connection.outgoing.left() > 0 {
                    self.queue_turn(client);
                }
                return Ok(());
            }
            Frame::End => channel.end(),
            Frame::Begins => return Ok(()),
        }
        match connection.busy {
            // The client has a turn soon.
            true => self.account_memory(client),
            false if connection.ending => self.leave(client),
            false => {
                let work = self.turn(client, limit.clamp(LEAST, CHANNEL_TURN), true);
                self.table.count_work(work);
            }
        }
        Ok(())
    }

    /// Does the next step of the client's request.
    pub(super) fn advance(&mut self, client: Client) -> Result<(), Refusal> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        let Some(mut task) = connection.task.take() else { return Ok(()) };
        let is_done = self.table.advance(client, &mut task, &mut self.replies)?;
        connection.task = Some(task).filter(|_| !is_done);
        Ok(())
    }

    /// Begins the client's next request, which has that length. Its first step is done at once,
    /// unless the turn is `short` and the request is not.
    pub(super) fn request(&mut self, client: Client, length: usize, short: bool) -> Result<(), Refusal> {
        let Some(connection) = self.clients.get_mut(&client) else { return Ok(()) };
        let work = connection.work_of_request(length);
        let Some(request) = connection.take_request() else { return Ok(()) };
        // A list stays where it is, and its keys are counted when they are looked at.
        self.table.count_work(if request.is_list() { length.min(LEAST) } else { work });
        let was_admitted = connection.is_admitted();
        let admission = connection.admit(request, self.secret.as_ref())?;
        if !was_admitted && connection.is_admitted() {
            self.connections.admitted(client);
        }
        let request = match admission {
            Admission::CarryOut(request) => request,
            Admission::Answered => return Ok(()),
            Admission::Refused(why) => {
                self.table.note_refused(connection.address, why, &mut self.replies);
                return Ok(());
            }
        };
        if !connection.asked && !request.is_greeting() {
            connection.asked = true;
            self.connections.asked(client);
        }
        if request == Request::Trunk {
            connection.begin_trunk()?;
        }
        let waits_for_turn = short && !request.is_short();
        if let Some(mut task) = self.table.handle(client, request, &mut self.replies)? {
            // Most requests are done in one step.
            let is_done = !waits_for_turn && self.table.advance(client, &mut task, &mut self.replies)?;
            connection.task = (!is_done).then(|| Box::new(task));
        }
        Ok(())
    }
}
