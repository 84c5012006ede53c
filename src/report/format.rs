//! Numbers and text as a reader of the page sees them.

/// Text made safe for element content and for quoted attributes.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Control characters are not allowed in HTML, however they are written.
            control if control.is_control() && !matches!(control, '\n' | '\t') => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}

/// A quantity with a decimal prefix: `950`, `12.3 k`, `1.24 M`.
pub(super) fn quantity(value: f64) -> String {
    let Some((size, prefix)) = decimal_prefix(value.abs() * 1.0005) else {
        return number(value);
    };
    format!("{} {prefix}", significant(value / size))
}

/// An integer quantity; below 1000 it stays exact.
pub(super) fn count(value: u64) -> String {
    quantity(value as f64)
}

/// An integer in full, in groups of three: `1 234 567` (narrow spaces).
pub(super) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// Bytes with a binary prefix: `512 B`, `1.50 GiB`.
pub(super) fn bytes(value: u64) -> String {
    const PREFIXES: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if value < 1024 {
        return format!("{value} B");
    }
    let mut scaled = value as f64 / 1024.0;
    let mut prefix = 0;
    // 1023.95 would be printed as 1024.
    while scaled >= 1023.5 && prefix + 1 < PREFIXES.len() {
        scaled /= 1024.0;
        prefix += 1;
    }
    format!("{} {}", significant(scaled), PREFIXES[prefix])
}

/// Three to four significant digits, or an exponent where digits would be lost: `3.214`, `0.98`, `3e-4`.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        value.to_string()
    } else if size == 0.0 {
        "0".to_owned()
    } else if !(1e-3..1e6).contains(&size) {
        exponent(value, 2)
    } else {
        let decimals = if size >= 1000.0 { 0 } else { (3 - size.log10().floor() as i32).clamp(0, 4) };
        trimmed(format!("{value:.*}", decimals as usize))
    }
}

/// A loss in nats, with the four decimals people compare.
pub(super) fn loss(value: f64) -> String {
    if value.abs() < 1e4 { format!("{value:.4}") } else { number(value) }
}

/// A share of one as per cent: `12.4 %`.
pub(super) fn percent(share: f64) -> String {
    let value = share * 100.0;
    if value == 0.0 || value >= 99.95 { format!("{value:.0} %") } else { format!("{value:.1} %") }
}

/// Seconds as the two largest units: `2 h 3 min`.
pub(super) fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return number(seconds);
    }
    if seconds < 59.5 {
        return if seconds < 9.95 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") };
    }
    let whole = seconds.round() as u64;
    match whole {
        ..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86400, whole % 86400 / 3600),
    }
}

/// A tick of an axis whose ticks are `step` apart, the largest being `largest`.
pub(super) fn tick(value: f64, step: f64, largest: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !(1e-2..1e15).contains(&largest) {
        let digits = (largest.log10().floor() - step.log10().floor()).clamp(0.0, 6.0);
        return exponent(value, digits as usize);
    }
    // Below ten thousand, 200 to 1000 reads better than 0.2 k to 1 k.
    let (size, prefix) = decimal_prefix(largest).filter(|_| largest >= 1e4).unwrap_or((1.0, ""));
    let decimals = (-((step / size).log10() + 1e-9).floor()).clamp(0.0, 9.0) as usize;
    let text = trimmed(format!("{:.*}", decimals, value / size));
    if prefix.is_empty() { text } else { format!("{text} {prefix}") }
}

/// A tick of a logarithmic axis: each stands for itself.
pub(super) fn tick_log(value: f64) -> String {
    if (1e-2..1e3).contains(&value) {
        number(value)
    } else if (1e3..1e12).contains(&value) {
        quantity(value)
    } else {
        exponent(value, 1)
    }
}

fn decimal_prefix(size: f64) -> Option<(f64, &'static str)> {
    const PREFIXES: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let found = PREFIXES.into_iter().find(|(from, _)| size >= *from)?;
    (size < 1e15).then_some(found)
}

/// Three significant digits of a value from 1 to 1000.
fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        ..9.995 => 2,
        9.995..99.95 => 1,
        _ => 0,
    };
    trimmed(format!("{value:.decimals$}"))
}

fn exponent(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$e}");
    match text.split_once('e') {
        Some((mantissa, power)) => format!("{}e{power}", trimmed(mantissa.to_owned())),
        None => text,
    }
}

/// Without zeros at the end of a fraction.
fn trimmed(text: String) -> String {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(found: String, expected: &str) {
        assert_eq!(found, expected);
    }

    #[test]
    fn markup_and_control_characters_are_harmless() {
        check(escape("<a href=\"x\" b='&'>"), "&lt;a href=&quot;x&quot; b=&#39;&amp;&#39;&gt;");
        check(escape("a\u{0}b\nc"), "a\u{fffd}b\nc");
    }

    #[test]
    fn quantities_carry_prefixes() {
        check(count(0), "0");
        check(count(950), "950");
        check(count(999_999), "1 M");
        check(count(12_345), "12.3 k");
        check(quantity(1.239e9), "1.24 G");
        check(quantity(f64::NAN), "NaN");
        check(grouped(1_234_567), "1\u{202f}234\u{202f}567");
    }

    #[test]
    fn bytes_are_binary() {
        check(bytes(1023), "1023 B");
        check(bytes(1536), "1.5 KiB");
        check(bytes(1024 * 1024 - 1), "1 MiB");
        check(bytes(u64::MAX), "16 EiB");
    }

    #[test]
    fn numbers_keep_their_digits() {
        check(number(3.21449), "3.214");
        check(number(0.98), "0.98");
        check(number(3e-4), "3e-4");
        check(number(-1e9), "-1e9");
        check(number(f64::NEG_INFINITY), "-inf");
        check(loss(2.5), "2.5000");
        check(percent(0.1234), "12.3 %");
    }

    #[test]
    fn durations_name_two_units() {
        check(duration(0.0), "0.0 s");
        check(duration(59.6), "1 min 0 s");
        check(duration(7380.0), "2 h 3 min");
        check(duration(90_000.0), "1 d 1 h");
    }

    #[test]
    fn ticks_agree_on_prefix_and_decimals() {
        check(tick(500.0, 500.0, 2000.0), "500");
        check(tick(500.0, 500.0, 12_000.0), "0.5 k");
        check(tick(20_000.0, 20_000.0, 100_000.0), "20 k");
        check(tick(0.25, 0.05, 0.3), "0.25");
        check(tick(3e-4, 1e-4, 4e-4), "3e-4");
        check(tick(-2.0, 1.0, 2.0), "-2");
        check(tick_log(0.01), "0.01");
        check(tick_log(1e4), "10 k");
        check(tick_log(1e-5), "1e-5");
    }
}
