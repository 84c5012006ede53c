//! Which plural form a number takes: `nplurals=2; plural=n != 1;`, where `plural` is an expression of C in unsigned
//! `n`.

/// No expression may be longer; the longest in use have some 200 bytes.
const BYTES_MAX: usize = 1000;

/// Brackets, negations and conditions within each other.
const DEPTH_MAX: usize = 60;

/// Numbers that are looked at to tell which form most numbers take.
const NUMBERS: u64 = 200;

/// The forms of a language.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluralForms {
    count: usize,
    expression: PluralExpression,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum PluralExpression {
    Number,
    Constant(u64),
    Not(Box<PluralExpression>),
    Binary(&'static str, Box<[PluralExpression; 2]>),
    Choice(Box<[PluralExpression; 3]>),
}

/// Those of English and German, which gettext takes where a header is silent.
impl Default for PluralForms {
    fn default() -> Self {
        let sides = [PluralExpression::Number, PluralExpression::Constant(1)];
        Self { count: 2, expression: PluralExpression::Binary("!=", Box::new(sides)) }
    }
}

impl PluralForms {
    /// The value of `Plural-Forms`; none where it is not well-formed.
    pub fn parse(value: &str) -> Option<Self> {
        let field = |name: &str| {
            let part = value.split(';').map(str::trim).find(|part| part.starts_with(name))?;
            part[name.len()..].trim_start().strip_prefix('=')
        };
        let count = field("nplurals")?.trim().parse().ok().filter(|count| (1..=32).contains(count))?;
        let text = field("plural").filter(|text| text.len() <= BYTES_MAX)?;
        let mut parser = PluralParser { rest: text, depth: 0 };
        let expression = parser.choice()?;
        parser.token().is_empty().then_some(Self { count, expression })
    }

    /// The form of a number, 0 where the expression gives none.
    pub fn form(&self, number: u64) -> usize {
        let form = self.expression.value(number).and_then(|form| usize::try_from(form).ok());
        form.filter(|&form| form < self.count).unwrap_or(0)
    }

    /// The form that most numbers take, the first of several.
    pub(super) fn form_of_most(&self) -> usize {
        let mut counts = vec![0; self.count];
        (0..NUMBERS).for_each(|number| counts[self.form(number)] += 1);
        let most = counts.iter().max().copied().unwrap_or(0);
        counts.iter().position(|&count| count == most).unwrap_or(0)
    }
}

impl PluralExpression {
    /// None where it divides by zero.
    fn value(&self, number: u64) -> Option<u64> {
        match self {
            PluralExpression::Number => Some(number),
            PluralExpression::Constant(value) => Some(*value),
            PluralExpression::Not(inner) => Some(u64::from(inner.value(number)? == 0)),
            PluralExpression::Choice(parts) => parts[if parts[0].value(number)? != 0 { 1 } else { 2 }].value(number),
            PluralExpression::Binary(operator, sides) => {
                let left = sides[0].value(number)?;
                // As in C the right side is not looked at where the left one decides.
                match (*operator, left) {
                    ("&&", 0) => return Some(0),
                    ("||", 1..) => return Some(1),
                    _ => {}
                }
                let right = sides[1].value(number)?;
                match *operator {
                    "||" | "&&" => Some(u64::from(right != 0)),
                    "==" => Some(u64::from(left == right)),
                    "!=" => Some(u64::from(left != right)),
                    "<" => Some(u64::from(left < right)),
                    ">" => Some(u64::from(left > right)),
                    "<=" => Some(u64::from(left <= right)),
                    ">=" => Some(u64::from(left >= right)),
                    "+" => Some(left.wrapping_add(right)),
                    "-" => Some(left.wrapping_sub(right)),
                    "*" => Some(left.wrapping_mul(right)),
                    "/" => left.checked_div(right),
                    _ => left.checked_rem(right),
                }
            }
        }
    }
}

/// Operators from those that bind least.
const LEVELS: [&[&str]; 6] = [&["||"], &["&&"], &["==", "!="], &["<=", ">=", "<", ">"], &["+", "-"], &["*", "/", "%"]];

struct PluralParser<'a> {
    rest: &'a str,
    depth: usize,
}

impl PluralParser<'_> {
    /// The next token without taking it; empty at the end.
    fn token(&self) -> &str {
        let rest = self.rest.trim_start();
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let two = rest.get(..2).filter(|two| ["||", "&&", "==", "!=", "<=", ">="].contains(two));
        two.unwrap_or_else(|| &rest[..digits.max(rest.chars().next().map_or(0, char::len_utf8))])
    }

    fn take(&mut self, token: &str) -> bool {
        let taken = self.token() == token;
        if taken {
            self.rest = &self.rest.trim_start()[token.len()..];
        }
        taken
    }

    fn choice(&mut self) -> Option<PluralExpression> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return None;
        }
        let condition = self.binary(0)?;
        let expression = if self.take("?") {
            let yes = self.choice()?;
            let no = self.take(":").then(|| self.choice())??;
            PluralExpression::Choice(Box::new([condition, yes, no]))
        } else {
            condition
        };
        self.depth -= 1;
        Some(expression)
    }

    fn binary(&mut self, level: usize) -> Option<PluralExpression> {
        let Some(operators) = LEVELS.get(level) else { return self.unary() };
        let mut left = self.binary(level + 1)?;
        while let Some(operator) = operators.iter().find(|operator| self.take(operator)) {
            let right = self.binary(level + 1)?;
            left = PluralExpression::Binary(operator, Box::new([left, right]));
        }
        Some(left)
    }

    fn unary(&mut self) -> Option<PluralExpression> {
        if self.take("!") {
            self.depth += 1;
            let inner = (self.depth <= DEPTH_MAX).then(|| self.unary())??;
            self.depth -= 1;
            return Some(PluralExpression::Not(Box::new(inner)));
        }
        if self.take("(") {
            let inner = self.choice()?;
            return self.take(")").then_some(inner);
        }
        if self.take("n") {
            return Some(PluralExpression::Number);
        }
        let digits = self.token().to_owned();
        let constant = digits.parse().ok()?;
        self.take(&digits).then_some(PluralExpression::Constant(constant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_those_of_c() {
        for (value, numbers, forms) in [
            ("nplurals=1; plural=0;", [0, 1, 2, 5, 11, 100], [0, 0, 0, 0, 0, 0]),
            ("nplurals=2; plural=n != 1", [0, 1, 2, 5, 11, 100], [1, 0, 1, 1, 1, 1]),
            ("nplurals=2; plural=(n > 1);", [0, 1, 2, 5, 11, 100], [0, 0, 1, 1, 1, 1]),
            (
                "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);",
                [1, 2, 5, 11, 21, 112],
                [0, 1, 2, 2, 0, 2],
            ),
            (
                "nplurals=4; plural=n==1||n==11?0:n==2||n==12?1:(n>2&&n<20)?2:3",
                [1, 11, 12, 3, 20, 0],
                [0, 0, 1, 2, 3, 3],
            ),
            ("nplurals=2; plural = !(n-1*1)*1 ", [0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]),
            ("nplurals=9; plural=8-n/2%3-1", [0, 2, 4, 6, 8, 9], [7, 6, 5, 7, 6, 6]),
            ("nplurals=2; plural=n/0", [0, 1, 2, 5, 11, 100], [0; 6]),
            ("nplurals=2; plural=n", [0, 1, 2, 5, 11, 100], [0, 1, 0, 0, 0, 0]),
        ] {
            let plurals = PluralForms::parse(value).unwrap();
            assert_eq!(numbers.map(|number| plurals.form(number)), forms, "{value}");
        }
    }

    #[test]
    fn what_is_no_expression_is_refused() {
        let (deep, long) = ("(".repeat(400), "n+".repeat(900));
        for plural in
            ["", "n n", "n?1", "n?1:", "(n", "n)", "m", "n=1", "é", "n+", "&&", "99999999999999999999", &deep, &long]
        {
            assert_eq!(PluralForms::parse(&format!("nplurals=2; plural={plural}")), None, "{plural}");
        }
        for value in
            ["", "nplurals=INTEGER; plural=EXPRESSION;", "nplurals=0; plural=0", "plural=0", "nplurals=99; plural=0"]
        {
            assert_eq!(PluralForms::parse(value), None, "{value}");
        }
        let negations = format!("nplurals=2; plural={}n", "!".repeat(500));
        assert_eq!(PluralForms::parse(&negations), None);
    }

    #[test]
    fn most_numbers_take_the_form_of_many() {
        let arabic = "nplurals=6; plural=n==0?0:n==1?1:n==2?2:n%100>=3&&n%100<=10?3:n%100>=11?4:5";
        let slovene = "nplurals=4; plural=(n%100==1 ? 1 : n%100==2 ? 2 : n%100==3 || n%100==4 ? 3 : 0);";
        for (value, one, most) in [(arabic, 1, 4), (slovene, 1, 0), ("nplurals=1; plural=0", 0, 0)] {
            let plurals = PluralForms::parse(value).unwrap();
            assert_eq!((plurals.form(1), plurals.form_of_most()), (one, most), "{value}");
        }
        assert_eq!((PluralForms::default().form(1), PluralForms::default().form_of_most()), (0, 1));
    }
}
