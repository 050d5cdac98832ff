//! The uses of a peer: their tokens, and the end of a connection that neither side uses.

use super::frame::{HEADER, Header, Kind};
use super::remote::{COST, CREDIT, Remote};
use crate::wire::Token;

impl Remote {
    /// Begins to close the connection. This side sends nothing more until the other side answers.
    pub(super) fn begin_to_close(&mut self) {
        self.say(Header::plain(Kind::Close, self.idles_there), &[]);
        self.last_frames = std::mem::take(&mut self.control);
        self.is_closing = true;
    }

    /// Says that this side has no use for the connection any more.
    pub(super) fn say_idle(&mut self) {
        self.is_idle_here = true;
        self.idles_here += 1;
        self.say(Header::plain(Kind::Idle, 0), &[]);
    }

    /// Prepares for the next connection after both sides have agreed to close this one. Messages
    /// that this side has begun to send meanwhile go over the next connection.
    pub(super) fn restart(&mut self) {
        (self.is_idle_there, self.is_closing) = (false, false);
        let eager = self.queue.iter().filter(|send| send.eager).map(|send| send.bytes + COST).sum();
        self.credit = CREDIT.saturating_sub(eager);
        (self.kept, self.owed) = (0, 0);
        self.arrived.clear();
        // The requests for messages, of both sides, belong to the connection that is closed. They
        // get no answers over the next one.
        self.posted.retain(|_, receive| receive.request.is_some());
        self.wanted.clear();
        (self.idles_here, self.idles_there) = (0, 0);
        self.forget_old_frames();
    }

    /// Removes the waiting frames that are about the connection that is closed. Over the next one,
    /// both sides begin with a use and with all credit.
    fn forget_old_frames(&mut self) {
        let control = std::mem::take(&mut self.control);
        let mut rest = &control[..];
        while let Some((raw, after)) = rest.split_first_chunk::<HEADER>() {
            let Ok(header) = Header::parse(raw) else { return };
            let (payload, after) = after.split_at(header.bytes.min(after.len()));
            if !matches!(header.kind, Kind::Idle | Kind::Busy | Kind::Credit) {
                self.say(header, payload);
            }
            rest = after;
        }
    }

    /// Returns the token to prove in the next try. `tried` is the number of tries that have failed.
    pub(super) fn token(&self, tried: usize) -> Token {
        let newest_first = self.tokens.iter().rev().cycle();
        newest_first.map(|(token, _)| *token).nth(tried % self.tokens.len().max(1)).unwrap_or_default()
    }

    /// Notes a use of the peer by a communicator with that token.
    pub(super) fn begin_use(&mut self, token: &Token) {
        self.uses += 1;
        match self.tokens.iter_mut().find(|(known, _)| known == token) {
            Some((_, uses)) => *uses += 1,
            None => self.tokens.push((*token, 1)),
        }
    }

    /// Notes the end of a use. When the last use ends, its token is kept, even after new uses
    /// begin: the peer may still wait in that communicator and know only this token. At most one
    /// such token is kept.
    pub(super) fn end_use(&mut self, token: &Token) {
        self.uses = self.uses.saturating_sub(1);
        if let Some(at) = self.tokens.iter().position(|(known, _)| known == token) {
            self.tokens[at].1 = self.tokens[at].1.saturating_sub(1);
            if self.tokens[at].1 == 0 && self.uses > 0 {
                self.tokens.remove(at);
            } else if self.uses == 0 {
                self.tokens.retain(|(known, _)| known == token);
            }
        }
    }

    /// Whether neither side has a use for the connection, and nothing is left to send.
    pub(super) fn may_close(&self) -> bool {
        self.uses == 0 && self.is_idle_there && !self.is_closing && !self.has_output()
    }
}
