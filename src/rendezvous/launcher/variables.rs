//! Environment variables as ranks, counts and addresses.

use std::fmt;

use crate::error::{Error, Result};

/// Looks up environment variables. An empty variable counts as one that is not set.
pub(super) struct Variables<'a> {
    /// Returns the value of a variable.
    pub(super) get: &'a dyn Fn(&str) -> Option<String>,
}

/// A variable that holds a rank or a count.
#[derive(Clone, Copy)]
pub(super) struct Number<'a> {
    /// The name of the variable, for messages.
    pub(super) name: &'a str,
    /// The number that the variable holds.
    pub(super) value: usize,
}

impl fmt::Display for Number<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}", self.name, self.value)
    }
}

impl Variables<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.get)(name).filter(|value| !value.is_empty())
    }

    pub(super) fn number<'a>(&self, name: &'a str) -> Result<Option<Number<'a>>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse::<usize>() {
            Ok(value) if value <= i32::MAX as usize => Ok(Some(Number { name, value })),
            _ => Err(Error::invalid(format!("environment variable {name} is {text:?}, which is no rank or count"))),
        }
    }

    /// Returns the first of these variables that is set.
    pub(super) fn first<'a>(&self, names: &[&'a str]) -> Result<Option<Number<'a>>> {
        names.iter().find(|name| self.text(name).is_some()).map_or(Ok(None), |name| self.number(name))
    }

    /// Reads MASTER_ADDR and MASTER_PORT, which must both be set or neither. An IPv6 address may
    /// stand in brackets.
    pub(super) fn master(&self) -> Result<Option<(String, u16)>> {
        let half = |there: &str, value: &str, missing: &str| {
            Err(Error::invalid(format!(
                "environment variable {there} is {value}, but {missing} is not set: set both or neither"
            )))
        };
        match (self.text("MASTER_ADDR"), self.text("MASTER_PORT")) {
            (Some(host), Some(port)) => match port.trim().parse::<u16>() {
                Ok(number) if number > 0 => {
                    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
                    Ok(Some((bare.unwrap_or(&host).to_owned(), number)))
                }
                _ => Err(Error::invalid(format!(
                    "environment variable MASTER_PORT is {port:?}, which is no port from 1 to 65535"
                ))),
            },
            (None, None) => Ok(None),
            (Some(host), None) => half("MASTER_ADDR", &host, "MASTER_PORT"),
            (None, Some(port)) => half("MASTER_PORT", &port, "MASTER_ADDR"),
        }
    }
}
