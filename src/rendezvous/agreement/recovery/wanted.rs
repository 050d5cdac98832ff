//! The mesh for which a newcomer asks, as a text, and whether it fits the mesh of the job.
//!
//! ```text
//! 3 2
//! dm_init(shape=(*, 2), names=(dp, tp))
//! dm_init(shape=(3, 2), names=(dp, tp))
//! ```
//!
//! The first line has the size of the outermost dimension and the number of ranks of each of its
//! indices. The second line has the part that must be equal on all processes, and the third line
//! has the whole call for messages. The size of the outermost dimension and the list of ranks are
//! not in the second line, because a job grows along that dimension.

/// A text of [`mesh_text`], or any other text. A text that [`mesh_text`] has not made fits only a
/// text that is equal to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rendezvous) struct Wanted<'a> {
    /// The size of the outermost dimension; 0 where the text does not say it.
    outermost: usize,
    /// The number of ranks of each index of the outermost dimension; 1 where the text does not say
    /// it.
    pub(in crate::rendezvous) row: usize,
    /// The part of the text that must be equal on all processes.
    rest: &'a str,
    /// The whole call, for messages.
    pub(super) call: &'a str,
}

/// Returns the text by which processes say which mesh they ask for. `rest` says what must be equal
/// on all of them, and `call` is the whole call. `row` is the number of ranks of each index of the
/// outermost dimension, whose size is `outermost`.
pub fn mesh_text(outermost: usize, row: usize, rest: &str, call: &str) -> String {
    // A dimension may have any name.
    let one_line = |text: &str| text.replace('\n', " ");
    format!("{outermost} {row}\n{}\n{}", one_line(rest), one_line(call))
}

impl<'a> Wanted<'a> {
    /// Reads the text of a mesh.
    pub(in crate::rendezvous) fn read(text: &'a str) -> Wanted<'a> {
        Wanted::of_lines(text).unwrap_or(Wanted { outermost: 0, row: 1, rest: text, call: text })
    }

    fn of_lines(text: &'a str) -> Option<Wanted<'a>> {
        let mut lines = text.split('\n');
        let (outermost, row) = lines.next()?.split_once(' ')?;
        let (outermost, row) = (outermost.parse().ok()?, row.parse().ok().filter(|row| *row > 0)?);
        let (rest, call) = (lines.next()?, lines.next()?);
        lines.next().is_none().then_some(Wanted { outermost, row, rest, call })
    }

    /// Whether a newcomer that asks for that seat of this mesh asks for the mesh of the job. `job`
    /// is the mesh with which the job has started, and `now` the size of its outermost dimension by
    /// now. The newcomer may say the size at the start or any size since. Where its seat is beyond
    /// the mesh of the start, the newcomer may also say a greater size.
    pub(super) fn fits(&self, job: &Wanted<'_>, seat: usize, now: usize) -> bool {
        let has_joined_later = || seat >= job.outermost.saturating_mul(job.row);
        match self.outermost == job.outermost {
            true => self == job,
            false => {
                let is_known_size = self.outermost > job.outermost && (self.outermost <= now || has_joined_later());
                (self.row, self.rest) == (job.row, job.rest) && is_known_size
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(outermost: usize, ranks: &str) -> String {
        mesh_text(outermost, 2, "dm_init((*, 2))", &format!("dm_init(({outermost}, 2){ranks})"))
    }

    #[test]
    fn a_newcomer_asks_for_the_mesh_of_the_start_or_for_a_later_one() {
        let texts: Vec<String> = (0..6).map(|size| of(size, "")).collect();
        let fits = |asked: usize, seat, now| Wanted::read(&texts[asked]).fits(&Wanted::read(&texts[2]), seat, now);
        // A newcomer for a seat of the start may say the size at the start, or the size to which
        // the job has grown.
        assert_eq!([1, 2, 3, 4].map(|asked| fits(asked, 1, 2)), [false, true, false, false]);
        assert_eq!([1, 2, 3, 4, 5].map(|asked| fits(asked, 1, 4)), [false, true, true, true, false]);
        // A newcomer for a seat beyond the mesh of the start may also say a greater size.
        assert_eq!([1, 2, 3, 5].map(|asked| fits(asked, 4, 2)), [false, true, true, true]);
    }

    #[test]
    fn ranks_count_where_the_sizes_are_equal_and_other_options_always() {
        let (job, other) = (of(2, ""), of(2, ", ranks=(1, 0, 2, 3)"));
        assert!(!Wanted::read(&other).fits(&Wanted::read(&job), 1, 2));
        let lazy = mesh_text(3, 2, "dm_init((*, 2), lazy)", "dm_init((3, 2), lazy)");
        assert!(!Wanted::read(&lazy).fits(&Wanted::read(&job), 4, 2));
        let row = mesh_text(3, 4, "dm_init((*, 2))", "");
        assert!(!Wanted::read(&row).fits(&Wanted::read(&job), 4, 2));
    }

    #[test]
    fn another_text_fits_where_it_is_equal() {
        for text in ["", "dm_init()", "3 2", "3 2\na", "3 0\na\nb", "3 2\na\nb\nc", "x 2\na\nb"] {
            let read = Wanted::read(text);
            assert_eq!((read.row, read.call), (1, text));
            assert!(read.fits(&read, 7, 2) && !read.fits(&Wanted::read("other"), 7, 2), "{text:?}");
        }
        let text = mesh_text(3, 2, "a\nb", "c\nd");
        assert_eq!(Wanted::read(&text), Wanted { outermost: 3, row: 2, rest: "a b", call: "c d" });
    }
}
