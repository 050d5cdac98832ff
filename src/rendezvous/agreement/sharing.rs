//! Finds out which things the ranks of a call can share: the first rank offers things, and each
//! other rank objects to those that it does not have.

use super::round::Round;
use super::verdict::DETAIL;
use crate::error::Result;
use crate::wait::Wait;

/// This text stands in a list of offers where a rank has nothing to share.
pub(super) const NOTHING: &str = "-";

/// Returns the place and the name of each thing that the first rank offers in its text.
pub(super) fn offered(word: &str) -> impl Iterator<Item = (usize, &str)> {
    let offers = word.splitn(3, DETAIL).nth(2).unwrap_or_default();
    offers.split(' ').enumerate().filter(|(_, name)| !name.is_empty() && *name != NOTHING)
}

impl Round {
    /// Objects to the things that the first rank offers and this rank does not have. The other
    /// ranks learn of an objection, because it is stored before this rank is counted.
    pub(super) fn object(&self, phase: &str, theirs: &str, wait: &Wait) -> Result<()> {
        let Some(mine) = &self.offers else { return Ok(()) };
        for (place, name) in offered(theirs) {
            if mine.split(' ').nth(place) != Some(name) {
                self.put(self.objection(phase, place), b"1", wait)?;
            }
        }
        Ok(())
    }

    /// Returns the places of the things that the first rank offers in its text and to which no rank
    /// objects. The last rank to be counted calls this function, when all objections are stored.
    pub(super) fn what_is_shared(&self, of_first: &str, phase: &str, wait: &Wait) -> Result<String> {
        let places: Vec<usize> = offered(of_first).map(|(place, _)| place).collect();
        let keys: Vec<String> = places.iter().map(|place| self.objection(phase, *place)).collect();
        let objected = self.membership.store.present(&keys, wait)?;
        let agreed = places.iter().zip(objected).filter(|(_, objected)| !objected);
        Ok(agreed.map(|(place, _)| place.to_string()).collect::<Vec<_>>().join(" "))
    }

    /// Returns the key of an objection to the thing that the first rank offers at that place.
    fn objection(&self, phase: &str, place: usize) -> String {
        self.key(phase, &format!("object/{place}"))
    }
}
