//! The texts that ranks leave in the store for a turn.
//!
//! ```text
//! 3
//! ends=0 dim=0 replace=1000 silent=- min_size=1 max_size=- any_state=0
//! 41
//! 2 4
//! dm_init(shape=(*, 4))
//! dm_init(shape=(2, 4))
//! dm_recover(dims=(dp, tp), dim=dp)
//! ```
//!
//! These are the options of a turn: the rank that came first, its terms with times in milliseconds,
//! the text of the mesh with which the job has started (wanted.rs) and the length of that text in
//! bytes, and the text of the call.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use std::time::Duration;

use super::Recovery;
use crate::error::{Error, Result, Status};
use crate::rendezvous::agreement::decision::Epoch;
use crate::rendezvous::agreement::proposal::Terms;

/// The options of the first rank of the mesh that has come to a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Options {
    /// The rank that came first.
    pub(super) rank: i32,
    /// The terms of that rank.
    pub(super) terms: Terms,
    /// The mesh with which the job has started, which is the mesh that is recovered. Newcomers,
    /// which are let in on these terms, learn of the mesh here. The text is empty where no rank
    /// has told the mesh.
    pub(super) mesh: String,
    /// The text of that rank's call.
    pub(super) call: String,
}

impl Options {
    /// Returns the error that these options of this rank differ from those of the first rank;
    /// `None` when they do not. `in_first_epoch` says whether this rank is in epoch 0, where a
    /// world may have several root meshes of one shape. Later the ranks go on from the mesh that
    /// the last recovery gave, and a rank that has joined may know the mesh of the start by another
    /// size.
    pub(super) fn mismatch(&self, first: &Options, in_first_epoch: bool) -> Option<Error> {
        let has_same_call = self.call == first.call;
        let has_same_terms = self.terms == first.terms;
        let is_unsaid = self.mesh.is_empty() || first.mesh.is_empty();
        let has_same_mesh = !in_first_epoch || is_unsaid || self.mesh == first.mesh;
        if has_same_call && has_same_terms && has_same_mesh {
            return None;
        }
        let more = |options: &Options| match (has_same_call, has_same_terms) {
            (false, _) => String::new(),
            (true, false) => format!(" with {}", options.terms),
            (true, true) => format!(" on the mesh of {}", options.mesh.lines().last().unwrap_or_default()),
        };
        let show = |options: &Options| format!("rank {} called {}{}", options.rank, options.call, more(options));
        let message = format!("{}, {}", show(self), show(first));
        Some(Error::new(Status::Mismatch, message).with_ranks(&[self.rank, first.rank]))
    }
}

impl Recovery {
    pub(super) fn options_key(&self, number: u64) -> String {
        self.turn_key(number, "options")
    }

    pub(super) fn read_options(&self, key: &str, value: &[u8]) -> Result<Options> {
        String::from_utf8_lossy(value).parse().map_err(|()| self.unreadable(key))
    }

    /// Does what [`read_options`](Recovery::read_options) does, for a process without terms of its
    /// own, which uses these terms for `epoch`.
    pub(super) fn adopt_options(&self, epoch: &Epoch, key: &str, value: &[u8]) -> Result<Options> {
        let options = self.read_options(key, value)?;
        let is_dim = options.terms.dim < epoch.replicas.sizes.len();
        if is_dim { Ok(options) } else { Err(self.unreadable(key)) }
    }

    fn unreadable(&self, key: &str) -> Error {
        Error::store(format!(
            "the store at {} gave unreadable options under the key {key}: it must give the values back as they were set",
            self.membership.store.name()
        ))
    }
}

impl Display for Options {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{}\n{}\n{}\n{}\n{}", self.rank, self.terms, self.mesh.len(), self.mesh, self.call)
    }
}

impl FromStr for Options {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Options, ()> {
        let mut lines = text.splitn(4, '\n');
        let mut line = || lines.next().ok_or(());
        let (rank, terms) = (line()?.parse().map_err(drop)?, line()?.parse()?);
        let (len, texts) = (line()?.parse().map_err(drop)?, line()?);
        let (mesh, call) = texts.split_at_checked(len).ok_or(())?;
        let call = call.strip_prefix('\n').ok_or(())?;
        Ok(Options { rank, terms, mesh: mesh.to_owned(), call: call.to_owned() })
    }
}

impl Display for Terms {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let or_none = |value: Option<u128>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        write!(
            out,
            "ends={} dim={} replace={} silent={} min_size={} max_size={} any_state={}",
            u8::from(self.ends),
            self.dim,
            self.replace.as_millis(),
            or_none(self.silent.map(|time| time.as_millis())),
            self.min_size,
            or_none(self.max_size.map(|size| size as u128)),
            u8::from(self.any_state)
        )
    }
}

impl FromStr for Terms {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Terms, ()> {
        let mut fields = text.split(' ');
        let mut field = |name: &str| {
            let value = fields.next().and_then(|field| field.strip_prefix(name)?.strip_prefix('='));
            match value.ok_or(())? {
                "-" => Ok(None),
                number => number.parse::<u64>().map(Some).map_err(drop),
            }
        };
        Ok(Terms {
            ends: field("ends")? == Some(1),
            dim: field("dim")?.ok_or(())? as usize,
            replace: Duration::from_millis(field("replace")?.ok_or(())?),
            silent: field("silent")?.map(Duration::from_millis),
            min_size: field("min_size")?.ok_or(())? as usize,
            max_size: field("max_size")?.map(|size| size as usize),
            any_state: field("any_state")? == Some(1),
        })
    }
}
