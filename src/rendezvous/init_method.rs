//! The place where the ranks meet, as the caller states it.

use crate::error::{Error, Result};

/// The place where the ranks meet.
pub(super) enum Method {
    /// The ranks meet at the address in the environment of the launcher.
    Env,
    /// The ranks meet at this host and port.
    Tcp(String, u16),
    /// The ranks meet in the folder of this path.
    File(String),
}

impl Method {
    pub(super) fn parse(text: Option<&str>) -> Result<Method> {
        let text = text.unwrap_or("env://");
        let broken = |why: &str| {
            Error::invalid(format!("init_method is {text:?}: {why}; it is env://, tcp://host:port or file:///path"))
        };
        if text == "env://" {
            return Ok(Method::Env);
        }
        if let Some(path) = text.strip_prefix("file://") {
            return match path.starts_with('/') && path.len() > 1 {
                true => Ok(Method::File(path.to_owned())),
                false => Err(broken("the path is not absolute")),
            };
        }
        let Some(address) = text.strip_prefix("tcp://") else { return Err(broken("no such method")) };
        let (host, port) = address.rsplit_once(':').ok_or_else(|| broken("there is no port"))?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse::<u16>() {
            _ if host.is_empty() => Err(broken("there is no host")),
            Ok(0) => Err(broken("the other ranks cannot know which port replaces port 0")),
            Ok(port) => Ok(Method::Tcp(host.to_owned(), port)),
            Err(_) => Err(broken("the port is not a number up to 65535")),
        }
    }
}
