//! Lists of hosts as Slurm writes them: `alpha[01-03,07],beta`.

/// The largest number of hosts in a list, which is the largest value of `--nnodes`.
const MOST: usize = 65_536;

/// All hosts of a list, in its order.
pub fn expand(list: &str) -> Result<Vec<String>, String> {
    let broken = || format!("{list:?} is no list of hosts such as alpha,beta or alpha[01-03,07]");
    let mut hosts = Vec::new();
    for part in split(list) {
        let mut names = vec![String::new()];
        let mut rest = part;
        while let Some((before, after)) = rest.split_once('[') {
            let (ranges, after) = after.split_once(']').ok_or_else(broken)?;
            let numbers = numbers(ranges).ok_or_else(broken)?;
            if names.len() * numbers.len() > MOST {
                return Err(format!("{list:?} has more than {MOST} hosts"));
            }
            let with =
                |name: &String| numbers.iter().map(|number| format!("{name}{before}{number}")).collect::<Vec<_>>();
            names = names.iter().flat_map(with).collect();
            rest = after;
        }
        if part.is_empty() || rest.contains(']') {
            return Err(broken());
        }
        hosts.extend(names.into_iter().map(|name| name + rest));
        if hosts.len() > MOST {
            return Err(format!("{list:?} has more than {MOST} hosts"));
        }
    }
    Ok(hosts)
}

/// Splits a list at the commas that are not in brackets.
pub fn split(list: &str) -> impl Iterator<Item = &str> {
    let mut is_inside = false;
    list.split(move |character| {
        match character {
            '[' => is_inside = true,
            ']' => is_inside = false,
            _ => {}
        }
        character == ',' && !is_inside
    })
}

/// The numbers of `01-03,07`, with their leading zeros.
fn numbers(ranges: &str) -> Option<Vec<String>> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(first) || !is_number(last) {
            return None;
        }
        let (from, to): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if to < from || to - from >= MOST {
            return None;
        }
        numbers.extend((from..=to).map(|number| format!("{number:0width$}", width = first.len())));
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use devicemesh::rendezvous::launcher::first_host;

    use super::expand;

    #[test]
    fn lists_are_expanded_as_slurm_does() {
        for (list, hosts) in [
            ("alpha", "alpha"),
            ("alpha,beta", "alpha beta"),
            ("alpha[01-03,07]", "alpha01 alpha02 alpha03 alpha07"),
            ("rack2-n[08,10-11],gpu-a", "rack2-n08 rack2-n10 rack2-n11 gpu-a"),
            ("n[9-10]", "n9 n10"),
            ("r[1-2]n[3-4]x", "r1n3x r1n4x r2n3x r2n4x"),
        ] {
            let expanded = expand(list).unwrap();
            assert_eq!(expanded.join(" "), hosts);
            assert_eq!(first_host(list).unwrap(), expanded[0]);
        }
        for broken in ["", "a,", ",a", "a[1-2", "a]", "a[]", "a[b]", "a[2-1]", "a[1-99999999]", "a[[1]]", "a[1-2,]"] {
            assert!(expand(broken).is_err(), "{broken}");
        }
    }
}
