//! The frames that come from another process.

use super::frame::{Header, Judged, Kind, OVER};
use super::ledger::{Key, Ledger};
use super::remote::{Arrived, COST, CREDIT, MOST_AHEAD, Receive, Remote, deliver};
use crate::wire::{Broken, Notice, Peer};

/// Where the bytes of a frame belong.
#[derive(Debug)]
pub(super) enum Sink {
    /// The frame has no bytes.
    None,
    /// The bytes belong in a caller's buffer.
    Direct {
        /// The message.
        key: Key,
        /// The address where the next byte belongs.
        to: usize,
        /// The message's length.
        total: usize,
    },
    /// The bytes are a short message for which no receive was posted.
    Keep {
        /// The message.
        key: Key,
        /// The bytes so far.
        data: Vec<u8>,
    },
    /// The bytes are a notice.
    Notice {
        /// The communicator that the notice is about.
        comm: u64,
        /// The bytes so far.
        text: Vec<u8>,
    },
    /// Nobody wants the bytes.
    Drop,
}

impl Remote {
    /// Takes the header of a frame from the connection. Returns where its bytes belong.
    pub(super) fn take_header(&mut self, header: Header, ledger: &mut Ledger) -> Judged<Sink> {
        let key = (header.tag, header.index);
        match header.kind {
            Kind::Eager => return self.take_eager(key, header.bytes, ledger),
            Kind::Data => return self.take_data(key, &header),
            Kind::Notice => {
                self.has_notice = true;
                if ledger.notices.len() < MOST_AHEAD {
                    return Ok(Sink::Notice { comm: header.tag.comm, text: Vec::with_capacity(header.bytes) });
                }
                return Ok(Sink::Drop);
            }
            Kind::Announce if !self.posted.contains_key(&key) && ledger.retired.has(key.0.comm, key.0.to) => {}
            Kind::Announce => match self.posted.get_mut(&key) {
                Some(receive) if receive.asked => {}
                Some(receive) => {
                    receive.asked = true;
                    let room = receive.room;
                    self.say_about(Kind::Want, key, room);
                }
                None => {
                    self.is_new(key)?;
                    self.arrived.insert(key, Arrived::Announced);
                }
            },
            Kind::Want => self.take_want(key, header.extra as usize, ledger)?,
            Kind::Void => self.take_void(key, header.extra == OVER as u64, ledger)?,
            Kind::TooLong => match self.posted.remove(&key) {
                Some(Receive { request: Some(request), .. }) => {
                    ledger.end(request, Err(Broken::TooLong(header.extra as usize)));
                }
                Some(_) => {}
                None => return Err("an answer to no question".to_owned()),
            },
            Kind::Credit => {
                self.credit = self.credit.saturating_add(header.extra as usize);
                if self.credit > CREDIT {
                    return Err(format!("a credit of {} bytes, more than was used", header.extra));
                }
            }
            Kind::Idle => {
                self.is_idle_there = true;
                self.idles_there += 1;
            }
            // `Busy` does not end the closing: the other side may be idle again before it reads
            // this side's `Close`. Only its answer counts.
            Kind::Busy => self.is_idle_there = false,
            Kind::Close => self.take_close(header.extra),
            Kind::Closed if self.is_closing => self.is_closed = true,
            Kind::Open if self.is_closing => self.is_closing = false,
            Kind::Closed | Kind::Open => return Err("an answer to no question".to_owned()),
            Kind::Alive => {}
        }
        Ok(Sink::None)
    }

    /// Checks that a message without a receive has not come before, and may be noted.
    pub(super) fn is_new(&self, key: Key) -> Judged<()> {
        if self.arrived.len() >= MOST_AHEAD {
            return Err(format!("more than {MOST_AHEAD} messages without receives"));
        }
        let is_old = self.arrived.contains_key(&key) || self.received.get(&key.0).is_some_and(|next| key.1 < *next);
        if is_old { Err("a message that has come before".to_owned()) } else { Ok(()) }
    }

    /// Answers the other side, which wants to close the connection. `heard` is the number of `Idle`
    /// frames that the other side had read. If this side has said more of them, it has had a use
    /// meanwhile. The other side may still need what this side has sent in that use.
    fn take_close(&mut self, heard: u64) {
        if self.uses > 0 || self.has_output() || self.idles_here > heard {
            return self.say(Header::plain(Kind::Open, 0), &[]);
        }
        self.say(Header::plain(Kind::Closed, 0), &[]);
        self.is_closed = true;
    }

    fn take_eager(&mut self, key: Key, bytes: usize, ledger: &mut Ledger) -> Judged<Sink> {
        let Some(receive) = self.posted.get(&key) else {
            if ledger.retired.has(key.0.comm, key.0.to) {
                self.owe(bytes);
                return Ok(Sink::Drop);
            }
            self.is_new(key)?;
            if self.kept + bytes + COST > CREDIT {
                return Err(format!("short messages of more than {CREDIT} bytes that nobody asked for"));
            }
            self.kept += bytes + COST;
            return Ok(Sink::Keep { key, data: Vec::with_capacity(bytes) });
        };
        if receive.got > 0 {
            return Err("two messages of one number".to_owned());
        }
        let (request, to, room) = (receive.request, receive.to, receive.room);
        self.owe(bytes);
        if request.is_none() || bytes > room {
            self.posted.remove(&key);
            if let Some(request) = request {
                ledger.end(request, Err(Broken::TooLong(bytes)));
            }
            return Ok(Sink::Drop);
        }
        self.posted.entry(key).and_modify(|receive| receive.got = bytes);
        Ok(Sink::Direct { key, to, total: bytes })
    }

    fn take_data(&mut self, key: Key, header: &Header) -> Judged<Sink> {
        let total = header.extra as usize;
        let receive = self.posted.get_mut(&key).filter(|receive| receive.asked);
        let receive = receive.ok_or_else(|| "a message that was not asked for".to_owned())?;
        let left = total.checked_sub(receive.got).filter(|left| header.bytes <= *left);
        let is_empty = header.bytes == 0 && total > 0;
        if left.is_none() || is_empty || (receive.request.is_some() && total > receive.room) {
            return Err(format!("{} bytes of a message of {total} that do not fit", header.bytes));
        }
        let to = receive.to + receive.got;
        receive.got += header.bytes;
        if receive.request.is_none() {
            if receive.got == total {
                self.posted.remove(&key);
            }
            return Ok(Sink::Drop);
        }
        Ok(Sink::Direct { key, to, total })
    }

    fn take_want(&mut self, key: Key, room: usize, ledger: &mut Ledger) -> Judged<()> {
        if ledger.retired.has(key.0.comm, key.0.sender()) {
            self.say_about(Kind::Void, key, OVER);
        } else if let Some(send) = self.held.remove(&key) {
            if send.bytes > room {
                self.say_about(Kind::TooLong, key, send.bytes);
                ledger.end(send.request, Ok(send.bytes));
            } else {
                self.queue.push_back(send);
            }
        } else if self.sent.get(&key.0).is_none_or(|next| key.1 >= *next) {
            if self.wanted.len() >= MOST_AHEAD {
                return Err(format!("more than {MOST_AHEAD} receives ahead of their messages"));
            }
            self.wanted.insert(key, room);
        }
        Ok(())
    }

    /// Does what the end of a frame calls for, once all bytes of the frame are in place.
    pub(super) fn finish(&mut self, sink: Sink, ledger: &mut Ledger) {
        match sink {
            Sink::Direct { key, total, .. } => {
                if self.posted.get(&key).is_some_and(|receive| receive.got == total) {
                    if let Some(Receive { request: Some(request), .. }) = self.posted.remove(&key) {
                        ledger.end(request, Ok(total));
                    }
                }
            }
            Sink::Keep { key, data } => match self.posted.remove(&key) {
                Some(receive) => {
                    self.taken(data.len());
                    // SAFETY: the receiver's buffer is valid, and `data` is none of the caller's.
                    unsafe { deliver(receive, data.as_ptr() as usize, data.len(), ledger) };
                }
                // The rank may have left its communicator while the message was arriving.
                None if ledger.retired.has(key.0.comm, key.0.to) => self.taken(data.len()),
                None => drop(self.arrived.insert(key, Arrived::Kept(data))),
            },
            Sink::Notice { comm, text } => {
                ledger.notices.push(Notice { from: Peer(self.number), comm, text });
                ledger.changed = true;
            }
            Sink::None | Sink::Drop => {}
        }
    }
}
