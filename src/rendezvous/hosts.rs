//! Which machine a rank runs on, as far as shared memory cares.

use std::fs;

/// What must be equal for two ranks to share memory, with a name for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostIdentity {
    /// The host's name.
    pub name: String,
    /// The kernel's boot id and this process's pid namespace: the engine finds its peers through /proc.
    pub boot: String,
}

impl HostIdentity {
    /// Of this process.
    pub fn here() -> HostIdentity {
        let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").map(|link| link.display().to_string()).unwrap_or_default();
        HostIdentity {
            name: read("/proc/sys/kernel/hostname"),
            boot: format!("{} {namespace}", read("/proc/sys/kernel/random/boot_id")),
        }
    }

    /// As one line, to compare and to publish.
    pub fn line(&self) -> String {
        format!("{} {}", self.name, self.boot)
    }
}
