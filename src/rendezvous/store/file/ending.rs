//! Removes what a world has left in the folder, when its last rank leaves it in order.
//!
//! Every rank that leaves writes a note in the folder, with the value of the counter of its joins.
//! The last rank removes the keys of the world, and the counters if no rank has begun another join
//! since. It removes the folder when nothing else is in it. The files of other jobs stay. When a
//! rank has crashed, all files stay, because then not all ranks have left.

use std::fs;

use super::super::{LeftWorld, parse_integer};
use super::{FileStore, LOCK, file_name};
use crate::error::Result;
use crate::wait::Wait;

impl FileStore {
    /// Notes that a rank has left a world, and removes what the world has left if it was the last
    /// one.
    pub(super) fn end(&self, world: &LeftWorld<'_>, wait: &Wait) -> Result<()> {
        // Under the lock nobody begins a join, because joins are counted under it too.
        let _lock = self.lock(wait)?;
        let note = |rank: usize| format!("{}/left/{rank}", world.prefix);
        if self.read(&note(world.rank))?.is_some() {
            // Two processes were started as one rank. Then nobody knows when all have left.
            return Ok(());
        }
        let joins = self.joins(world.counter)?;
        self.write(&note(world.rank), format!("{joins} {}", world.counter).as_bytes())?;
        let count_key = format!("{}/left", world.prefix);
        let left = parse_integer(self, &count_key, self.read(&count_key)?.as_deref())? + 1;
        self.write(&count_key, left.to_string().as_bytes())?;
        if left < world.size as i64 {
            return Ok(());
        }
        let notes: Vec<Option<Vec<u8>>> = (0..world.size).map(|rank| self.read(&note(rank))).collect::<Result<_>>()?;
        self.remove_beginning_with(&format!("{}/", world.prefix));
        let _ = fs::remove_file(self.path(&count_key));
        self.remove_running(world);
        if let Some(counters) = self.unchanged(&notes, joins) {
            for counter in counters {
                let _ = fs::remove_file(self.path(&counter));
            }
            self.remove_shared(world);
        }
        self.remove_folder();
        Ok(())
    }

    fn joins(&self, counter: &str) -> Result<i64> {
        parse_integer(self, counter, self.read(counter)?.as_deref())
    }

    /// Returns the counters of the joins of all ranks, if each still has the value `joins`. If one
    /// has another value, its rank has begun another join, and all ranks need their counters.
    fn unchanged(&self, notes: &[Option<Vec<u8>>], joins: i64) -> Option<Vec<String>> {
        let counter = |note: &Option<Vec<u8>>| {
            let text = String::from_utf8(note.clone()?).ok()?;
            let (noted, counter) = text.split_once(' ')?;
            let is_unchanged = noted.parse() == Ok(joins) && self.joins(counter).is_ok_and(|now| now == joins);
            is_unchanged.then(|| counter.to_owned())
        };
        notes.iter().map(counter).collect()
    }

    /// Removes the key that says that this world runs. Another world may have the key by now.
    fn remove_running(&self, world: &LeftWorld<'_>) {
        let Some((join, nonce)) = world.prefix.rsplit_once('/') else { return };
        let running = format!("{join}/running");
        let said = self.read(&running).ok().flatten().unwrap_or_default();
        if said.starts_with(nonce.as_bytes()) {
            let _ = fs::remove_file(self.path(&running));
        }
    }

    /// Removes the counter of tokens, if no other world has keys of the same join.
    fn remove_shared(&self, world: &LeftWorld<'_>) {
        let Some((join, _)) = world.prefix.rsplit_once('/') else { return };
        let tokens = format!("{join}/tokens");
        let begins = file_name(&format!("{join}/"));
        if self.names().iter().all(|name| !name.starts_with(&begins) || *name == file_name(&tokens)) {
            let _ = fs::remove_file(self.path(&tokens));
        }
    }

    /// Removes the lock and the folder, if nothing else is there.
    fn remove_folder(&self) {
        if self.names().iter().all(|name| name == LOCK) {
            let _ = fs::remove_file(self.folder.join(LOCK));
            // This fails when another process has put something there.
            let _ = fs::remove_dir(&self.folder);
        }
    }

    /// Removes the keys that begin with `prefix`.
    fn remove_beginning_with(&self, prefix: &str) {
        let begins = file_name(prefix);
        for name in self.names().iter().filter(|name| name.starts_with(&begins)) {
            let _ = fs::remove_file(self.folder.join(name));
        }
    }

    /// Returns the names of all files in the folder. Names that are no text are shown with a
    /// replacement character, so the folder never counts as empty because of them.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }
}
