//! The environment variables that go to the other hosts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use super::options::RSH_VARIABLE;
use crate::failure::Failure;
use crate::terminal::{self, COLUMNS};

/// Variables whose names begin with one of these words and "_" are passed on without `-x`, because
/// all ranks need the same values.
const ALWAYS: [&str; 2] = ["DM", "NCCL"];
/// Variables with such names that are not passed on, because they belong to one host.
const NEVER: [&str; 2] = [RSH_VARIABLE, "DM_HOSTCCL_HOST"];

/// Returns the names and values of the variables that the ranks on every host get: the width of the
/// terminal here, which shows their output, those that are always passed on, and those of `-x`.
/// Where a name comes twice, the later value counts.
pub fn forwarded(asked: &[String]) -> Result<Vec<(OsString, OsString)>, Failure> {
    let here: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    let begins = |prefix: &str| {
        let begins = |name: &OsString| name.as_bytes().starts_with(prefix.as_bytes());
        here.iter().filter(|(name, _)| begins(name)).cloned().collect::<Vec<_>>()
    };
    let mut all: Vec<(OsString, OsString)> = ALWAYS.iter().flat_map(|prefix| begins(&format!("{prefix}_"))).collect();
    all.retain(|(name, _)| !NEVER.iter().any(|never| name == never));
    all.extend(terminal::width().map(|width| (COLUMNS.into(), width.to_string().into())));
    for text in asked {
        match (text.split_once('='), text.strip_suffix('*')) {
            (Some((name, value)), _) if !name.is_empty() => all.push((name.into(), value.into())),
            (None, Some(prefix)) => all.extend(begins(prefix)),
            (None, None) => match std::env::var_os(text).filter(|_| !text.is_empty()) {
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
