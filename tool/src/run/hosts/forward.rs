//! The environment variables that go to the other hosts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use devicemesh::rendezvous::launcher::STARTED_BY_RUN;
use devicemesh::rendezvous::store::RELAY;

use super::options::RSH_VARIABLE;
use crate::failure::Failure;
use crate::run::environment::{JOIN, MESH_SIZE, STORE, is_in_rank};
use crate::terminal::{self, COLUMNS};

/// Variables whose names begin with one of these words and "_" are passed on without `-x`, because
/// all ranks need the same values.
const ALWAYS: [&str; 2] = ["DM", "NCCL"];
/// Variables with such names that are not passed on, because they belong to one host, or to the job
/// in which this tool runs. The tools on the hosts set those of this job.
const NEVER: [&str; 5] = [RSH_VARIABLE, "DM_HOSTCCL_HOST", STARTED_BY_RUN, RELAY, MESH_SIZE];
/// Variables that are not passed on where a rank of another job has started this tool. The user may
/// have set them elsewhere.
const OF_ANOTHER_JOB: [&str; 2] = [STORE, JOIN];

/// Returns the names and values of the variables that the ranks on every host get: the width of the
/// terminal here, which shows their output, those that are always passed on, and those of `-x`.
/// Where a name comes twice, the later value counts.
pub fn forwarded(asked: &[String]) -> Result<Vec<(OsString, OsString)>, Failure> {
    forwarded_of(std::env::vars_os().collect(), asked)
}

/// Returns what [`forwarded`] returns, for a tool whose variables are `here`.
fn forwarded_of(here: Vec<(OsString, OsString)>, asked: &[String]) -> Result<Vec<(OsString, OsString)>, Failure> {
    let value = |wanted: &str| here.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.clone());
    let text = |name: &str| value(name)?.into_string().ok().filter(|value| !value.is_empty());
    let others: &[&str] = if is_in_rank(&text) { &OF_ANOTHER_JOB } else { &[] };
    let begins = |prefix: &str| {
        let begins = |name: &OsString| name.as_bytes().starts_with(prefix.as_bytes());
        here.iter().filter(|(name, _)| begins(name)).cloned().collect::<Vec<_>>()
    };
    let mut all: Vec<(OsString, OsString)> = ALWAYS.iter().flat_map(|prefix| begins(&format!("{prefix}_"))).collect();
    all.retain(|(name, _)| !NEVER.iter().chain(others).any(|never| name == never));
    all.extend(terminal::width().map(|width| (COLUMNS.into(), width.to_string().into())));
    for text in asked {
        match (text.split_once('='), text.strip_suffix('*')) {
            (Some((name, value)), _) if !name.is_empty() => all.push((name.into(), value.into())),
            (None, Some(prefix)) => all.extend(begins(prefix)),
            (None, None) => match value(text).filter(|_| !text.is_empty()) {
                Some(value) => all.push((text.into(), value)),
                None => {
                    return Err(Failure::new(
                        2,
                        format!("-x {text}: this variable is not set here; -x {text}=VALUE sets it"),
                    ));
                }
            },
            _ => {
                return Err(Failure::new(
                    2,
                    format!("-x {text:?}: write NAME, NAME=VALUE, or the beginning of names and a star (`NAME_*`)"),
                ));
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_of_another_job_are_not_passed_on() {
        let names = |here: &[&str]| -> Vec<String> {
            let here = here.iter().map(|name| (name.into(), "1".into())).collect();
            let passed = forwarded_of(here, &[]).ok().unwrap();
            let names = passed.into_iter().map(|(name, _)| name.into_string().unwrap());
            names.filter(|name| name != COLUMNS).collect()
        };
        let of_job = ["DM_STARTED_BY_RUN", "DM_STORE_RELAY", "DM_MESH_SIZE"];
        let users = ["DM_STORE", "DM_JOIN", "DM_LOG"];
        assert_eq!(names(&[&users[..], &of_job, &["PATH"]].concat()), users);
        let of_rank = ["RANK", "TORCHELASTIC_RUN_ID"];
        assert_eq!(names(&[&users[..], &of_job, &of_rank].concat()), ["DM_LOG"]);
    }
}
