//! How well accesses fit the hardware: conflicts of shared memory's banks, and sectors of global memory.

use crate::isa::pure::Lanes;

/// Wavefronts beyond the first of one access to shared memory, which has 32 banks of 4 bytes.
///
/// Lanes with 8 bytes go by halves of the warp, with 16 by quarters; equal words count once.
pub(super) fn conflicts(addresses: &Lanes, mask: u32, bytes: usize) -> u64 {
    let lanes = match bytes {
        16 => 8,
        8 => 16,
        _ => 32,
    };
    (0..32).step_by(lanes).map(|first| waves(addresses, mask, first..first + lanes, bytes)).sum()
}

fn waves(addresses: &Lanes, mask: u32, lanes: std::ops::Range<usize>, bytes: usize) -> u64 {
    // words of each bank; almost always one
    let mut seen = [(0_u8, [0_u32; 4]); 32];
    let mut most = 0;
    for lane in lanes.filter(|lane| mask >> lane & 1 != 0) {
        let first = addresses[lane] as u32 / 4;
        for word in first..first + bytes.div_ceil(4) as u32 {
            let (count, words) = &mut seen[word as usize % 32];
            let known = usize::from(*count).min(4);
            if words[..known].contains(&word) {
                continue;
            }
            if known < 4 {
                words[known] = word;
            }
            *count += 1;
            most = most.max(*count);
        }
    }
    u64::from(most.saturating_sub(1))
}

/// Sectors of 32 bytes that one access to global memory touches, and how few would do.
pub(super) fn sectors(addresses: &Lanes, mask: u32, bytes: usize) -> (u64, u64) {
    let mut touched = [0; 64];
    let mut count = 0;
    for lane in (0..32).filter(|lane| mask >> lane & 1 != 0) {
        let sector = addresses[lane] / 32;
        // neighbours mostly touch the same
        if count > 0 && touched[count - 1] == sector {
            continue;
        }
        if !touched[..count].contains(&sector) {
            touched[count] = sector;
            count += 1;
        }
    }
    let ideal = (mask.count_ones() as usize * bytes).div_ceil(32).min(count);
    (count as u64, ideal as u64)
}
