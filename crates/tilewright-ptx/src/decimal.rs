//! Decimal numbers at the end of a text, several times as fast as `write!`, which would take most of the time that kernels are
//! named and printed in.

/// Writes `number` behind `text`.
pub(crate) fn push(text: &mut String, number: u32) {
    if number >= 10 {
        push(text, number / 10);
    }
    text.push(char::from(b'0' + (number % 10) as u8));
}

#[cfg(test)]
mod tests {
    use super::push;

    #[test]
    fn numbers_are_written_as_std_writes_them() {
        let powers = (0..10).map(|exponent| 10_u32.pow(exponent));
        for number in powers.flat_map(|power| [power - 1, power, power + 1]).chain([u32::MAX]) {
            let mut text = "x".to_owned();
            push(&mut text, number);
            assert_eq!(text, format!("x{number}"));
        }
    }
}
