//! Memory traffic counters: shared-memory bank conflicts and global-memory sectors.

use crate::isa::pure::Lanes;

/// The wavefronts of a shared-memory access after the first. Shared memory has 32 banks of 4 bytes.
///
/// 8-byte accesses are split into half warps, 16-byte accesses into quarter warps; equal words count once.
pub(super) fn bank_conflicts(addresses: &Lanes, mask: u32, bytes: usize) -> u64 {
    let lanes = match bytes {
        16 => 8,
        8 => 16,
        _ => 32,
    };
    let mut excess = 0;
    for first in (0..32).step_by(lanes) {
        let active = (first..first + lanes).filter(|lane| mask >> lane & 1 != 0);
        let accesses = active.map(|lane| addresses[lane] as u32);
        if !has_distinct_banks(accesses.clone(), bytes) {
            excess += u64::from(max_words_per_bank(accesses, bytes).saturating_sub(1));
        }
    }
    excess
}

/// Whether no two accesses share a bank, except adjacent lanes that access one word.
fn has_distinct_banks(accesses: impl Iterator<Item = u32>, bytes: usize) -> bool {
    let (shift, mut seen, mut last) = (bytes.max(4).trailing_zeros(), 0_u32, u32::MAX);
    for address in accesses {
        let (word, bit) = (address >> shift, 1 << ((address % 128) >> shift));
        if word != last && seen & bit != 0 {
            return false;
        }
        (seen, last) = (seen | bit, word);
    }
    true
}

fn max_words_per_bank(accesses: impl Iterator<Item = u32>, bytes: usize) -> u8 {
    // words per bank; almost always one
    let (mut words, mut counts, mut most) = ([[0; 4]; 32], [0_u8; 32], 0);
    for address in accesses {
        for word in address / 4..address / 4 + bytes.div_ceil(4) as u32 {
            let (count, words) = (&mut counts[word as usize % 32], &mut words[word as usize % 32]);
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
    most
}

/// The 32-byte sectors of a global-memory access, and the minimum for its size.
pub(super) fn sectors(addresses: &Lanes, mask: u32, bytes: usize) -> (u64, u64) {
    let mut touched = [0; 64];
    let mut count = 0;
    for lane in (0..32).filter(|lane| mask >> lane & 1 != 0) {
        let sector = addresses[lane] / 32;
        // adjacent lanes mostly share a sector
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
