use super::*;

#[test]
fn shares_fit_the_slot_and_cover_every_block() {
    for (nranks, among) in [(2, 0), (3, 0), (8, 0), (64, 0), (300, 0), (1024, 0), (4, 64), (1000, 1024)] {
        let layout = Layout::split(nranks, among);
        let n = nranks as usize;
        let mut seed = 7_u64;
        for round in 0..60 {
            let counts: Vec<usize> = (0..n)
                .map(|rank| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(rank as u64 | 1);
                    match round % 4 {
                        0 => (seed >> 60) as usize,
                        1 => (seed >> 33) as usize % 100_000,
                        2 => usize::from(rank == round % n) * 5_000_000,
                        _ => 0,
                    }
                })
                .collect();
            for size in [1, 2, 4, 8] {
                let (shares, chunks) = share_out(counts.iter().copied(), size, &layout);
                let mut next = table_bytes(n);
                for (share, count) in shares.iter().zip(&counts) {
                    assert!(share.offset >= next && share.offset % 8 == 0);
                    next = share.offset + share.each * size;
                    assert!(share.each * chunks >= *count, "{nranks} ranks: {count} in {chunks} of {}", share.each);
                }
                assert!(next <= layout.slot_bytes, "{nranks} ranks: {next} of {}", layout.slot_bytes);
                let total: usize = counts.iter().sum();
                assert!(total > 0 || chunks == 1);
            }
        }
    }
}

#[test]
fn fingerprints_depend_on_the_count_and_on_both_ranks() {
    let all = [(0, 1, 5), (1, 0, 5), (0, 1, 6), (0, 2, 5), (0, 0, 0), (0, 1, 0)];
    for (i, a) in all.iter().enumerate() {
        for b in &all[..i] {
            assert_ne!(fingerprint(a.0, a.1, a.2), fingerprint(b.0, b.1, b.2));
        }
    }
}
