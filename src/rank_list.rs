//! Writes lists of ranks for messages.

/// Writes ranks as people do: "rank 5", "ranks 5, 17-31 and 40 more".
pub(crate) fn ranges(ranks: &[i32]) -> String {
    const SHOWN: usize = 8;
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let mut runs: Vec<(i32, i32)> = Vec::new();
    for rank in sorted {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |(first, last): &(i32, i32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let shown: Vec<String> = runs.iter().take(SHOWN).map(text).collect();
    let more: i32 = runs.iter().skip(SHOWN).map(|(first, last)| last - first + 1).sum();
    match more {
        0 => format!("{noun} {}", shown.join(", ")),
        more => format!("{noun} {} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_missing_ranks_are_written_as_ranges() {
        assert_eq!(ranges(&[5]), "rank 5");
        assert_eq!(ranges(&[31, 5, 17, 18, 19]), "ranks 5, 17-19, 31");
        let odd: Vec<i32> = (0..40).map(|index| 2 * index + 1).collect();
        assert_eq!(ranges(&odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 32 more");
    }
}
