//! The check of encrypted connections that the replay of the corpus and the fuzz target share.

use devicemesh::rendezvous::store::Secret;
use devicemesh::rendezvous::store::records::Records;

/// Checks what holds for any bytes of somebody between a client and a server who does not have the
/// secret, and panics where it does not hold. The first byte says what the bytes stand for.
pub fn check_any_bytes(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let secret = Secret::new(b"secret").unwrap();
    let (mut client, first) = Records::initiator(&secret).unwrap();
    if kind % 3 == 0 {
        // Messages of a handshake, to both sides.
        assert!(Records::responder(&secret, bytes).is_err());
        assert!(client.finish(bytes).is_err());
        return;
    }
    let (mut server, second) = Records::responder(&secret, &first).unwrap();
    client.finish(&second).unwrap();
    let mut opened = Vec::new();
    if kind % 3 == 1 {
        // Everything that comes after the handshake.
        let _ = server.open(bytes, &mut opened);
        assert!(opened.is_empty() && !server.is_proved());
        return;
    }
    // Records of the client, of which some bytes are changed, left out or sent twice on their way.
    let (mut sealed, mut text) = (Vec::new(), Vec::new());
    for (number, length) in bytes.iter().take(4).enumerate() {
        let record = vec![number as u8; 1 + usize::from(*length) * 7];
        client.seal(&record, &mut sealed).unwrap();
        text.extend(record);
    }
    for change in bytes.get(4..).unwrap_or_default().chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % sealed.len();
        match change[2] {
            0..100 => sealed[at] ^= change[2],
            100..200 => drop(sealed.drain(at..sealed.len().min(at + usize::from(change[2]) - 99))),
            length => {
                let again = sealed[at..sealed.len().min(at + usize::from(length) - 199)].to_vec();
                sealed.splice(at..at, again);
            }
        }
        if sealed.is_empty() {
            break;
        }
    }
    let pieces = sealed.chunks(1 + usize::from(bytes.first().copied().unwrap_or(0)));
    for piece in pieces {
        if server.open(piece, &mut opened).is_err() {
            // Nothing opens after that, so the server must not go on.
            let before = opened.len();
            let _ = server.open(&[0; 64], &mut opened);
            assert_eq!(opened.len(), before);
            break;
        }
    }
    assert!(text.starts_with(&opened), "{opened:?} of {text:?}");
}
