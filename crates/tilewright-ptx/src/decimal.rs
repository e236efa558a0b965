//! Appends decimal integers to a string. Several times faster than `write!`, which would dominate the time to name and print
//! kernels.

/// Appends `number` to `text`.
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
    fn push_matches_std_formatting() {
        let powers = (0..10).map(|exponent| 10_u32.pow(exponent));
        for number in powers.flat_map(|power| [power - 1, power, power + 1]).chain([u32::MAX]) {
            let mut text = "x".to_owned();
            push(&mut text, number);
            assert_eq!(text, format!("x{number}"));
        }
    }
}
