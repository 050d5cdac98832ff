//! Reads what other nodes have written into the store. The values are not trusted, because anybody
//! may have written them.

use devicemesh::printable::printable;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::keys::OVER;
use crate::run::cause::Cause;

/// Reads a value, without the characters that act on a terminal. Only the output of a rank keeps
/// its line breaks and tabs.
pub fn from_a_peer<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    let mut value = serde_json::from_slice(text)?;
    clean(&mut value);
    serde_json::from_value(value)
}

fn clean(value: &mut Value) {
    match value {
        Value::String(text) => *text = printable(text).into_owned(),
        Value::Array(values) => values.iter_mut().for_each(clean),
        Value::Object(fields) => fields.iter_mut().for_each(|(name, value)| match value {
            Value::String(text) if name == "output" => {
                let parts = text.split_inclusive(['\n', '\t']).map(|part| {
                    let end = part.len() - usize::from(part.ends_with(['\n', '\t']));
                    format!("{}{}", printable(&part[..end]), &part[end..])
                });
                *text = parts.collect();
            }
            value => clean(value),
        }),
        _ => {}
    }
}

/// Reads the cause for which the job ends. An unreadable text also ends the job, with a cause that
/// quotes it.
pub fn read_cause(text: &[u8]) -> Cause {
    from_a_peer(text).unwrap_or_else(|error| Cause::Refused {
        message: format!("{OVER} in the store holds {:?}: {error}", String::from_utf8_lossy(text)),
    })
}
