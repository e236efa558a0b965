//! Sets of registers, and decimal integers.

#[path = "../../src/decimal.rs"]
mod decimal;
#[path = "../../src/register_set.rs"]
mod register_set;

use register_set::RegisterSet;
use tilewright_ptx::ir::Reg;

fn set_of(count: usize, indices: &[u32]) -> RegisterSet {
    let mut set = RegisterSet::empty(count);
    indices.iter().for_each(|&index| set.insert(Reg(index)));
    set
}

fn indices(count: usize, set: &RegisterSet) -> Vec<u32> {
    (0..count as u32).filter(|&index| set.contains(Reg(index))).collect()
}

#[test]
fn registers_at_word_boundaries_are_distinct() {
    for count in [1, 63, 64, 65, 128, 129] {
        for index in 0..count as u32 {
            assert_eq!(indices(count, &set_of(count, &[index])), [index], "of {count}");
        }
    }
    assert_eq!(indices(130, &set_of(130, &[0, 63, 64, 127, 128, 129])), [0, 63, 64, 127, 128, 129]);
}

#[test]
fn intersection_keeps_common_registers() {
    let mut set = set_of(130, &[0, 5, 63, 64, 127, 129]);
    set.intersect(&set_of(130, &[1, 5, 64, 128, 129]));
    assert_eq!(indices(130, &set), [5, 64, 129]);
}

#[test]
fn push_matches_std_formatting() {
    let powers = (0..10).map(|exponent| 10_u32.pow(exponent));
    for number in powers.flat_map(|power| [power - 1, power, power + 1]).chain([u32::MAX]) {
        let mut text = "x".to_owned();
        decimal::push(&mut text, number);
        assert_eq!(text, format!("x{number}"));
    }
}
