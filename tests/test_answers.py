"""grading/answers.py: the same answer in another spelling, and answers that only look like it."""

import pytest
from made import table

from grading.answers import compare

# A line has an answer and, after two spaces or more, the right one.
SAME = (
    # looks
    r"""
    \displaystyle 5                  5
    \color{red}{5}                   5
    \textcolor{blue}{5}              5
    5\$                              5
    \langle 1,2,3\rangle             (1,2,3)
    \boldsymbol{5}                   5
    –5                               -5
    \bigl(3,4\bigr)                  (3,4)
    \Bigl[\tfrac12,4\Bigr)           [\frac12,4)
    2\bigl(x+1\bigr)                 2x+2
    \lbrace 1,2\rbrace               \{1,2\}
    \left\lbrace 1,2\right\rbrace    1,2
    \text{The answer is } 7          7
    The answer is 7                  7
    \text{The answer is }\frac12     .5
    """
    # Unicode
    r"""
    2√3       2\sqrt3
    √12       2\sqrt3
    √(x+1)    \sqrt{x+1}
    ½         0.5
    7½        7.5
    ⅔         \frac23
    x²        x^2
    2x³y²     2x^3y^2
    x¹²       x^{12}
    10⁻³      0.001
    """
    # powers of ten
    r"""
    1.5e3      1500
    -1.5E+3    -1500
    2.5e-3     0.0025
    1.5e       \frac32e
    2e-1       -1+2e
    """
    # plain numbers, compared digit for digit
    r"""
    5      5
    5.0    5
    +5     5
    025    25
    .5     0.5
    5.     5
    """
    # a rounded decimal is not the number, except to twelve places
    r"""
    0.0833333333333333    \frac{1}{12}
    0.5                   \frac12
    """
    # small constants: their difference is not nothing
    r"""
    6.72\times 10^{-5}    .0000672
    1.5\cdot10^6          1500000
    4^{504.5}             2^{1009}
    """
    # periodic decimals
    r"""
    0.\overline{3}      \frac13
    -0.1\overline{6}    -\frac16
    x=.\bar3            \frac13
    0.\overline{34}     \frac{34}{99}
    2.\overline{3}x     \frac{7x}{3}
    """
    # thousands
    r"""
    1,000              1000
    1{,}000{,}000      1000000
    10,\!080           10080
    1 000              1000
    10\,080            10080
    10\ 080            10080
    12~345~678         12345678
    \$32,\!348         32348
    x=1,000            1000
    1,000\text{ km}    1000
    """
    # mixed numbers, and numbers that only stand side by side
    r"""
    7 3/4       \frac{31}{4}
    7\frac34    \frac{31}{4}
    -7 3/4      -\frac{31}{4}
    """
    # million and its like
    r"""
    5\text{ hundred}             500
    3\text{ million}             3000000
    3 million                    3000000
    \$2.5\text{ billion}         2500000000
    12\text{ dozen eggs}         144
    5\text{ halves}              \frac52
    \frac12\text{ million}       500000
    15\text{ dozens}             180
    15 dozens                    180
    4\text{ thousands}           4000
    3 tenths                     0.3
    3\text{ hundred thousand}    300000
    3\text{ hundredths}          0.03
    3\text{ eighths}             \frac38
    """
    # units, degrees, ordinals
    r"""
    6\text{ one-inch cubes}    6
    5\text{ meters squared}    5
    5\text{ times}             5
    5\text{ cm}                5
    5                          5\mbox{ cm}^2
    12\,\mathrm{km/h}          12
    4\text{ square inches}     4
    36 dollars                 36
    £36                        36
    \text{36 dollars}          36
    12 square units            12
    30^\circ                   30
    30°                        30^{\circ}
    \frac{270}{7}^\circ        \frac{270}7\text{ degrees}
    5^{\text{th}}              5
    21st                       21
    30\degree                  30
    30^\degree                 30^\circ
    \sin 60\degree             \frac{\sqrt3}{2}
    5\,\mathrm{m\,s^{-1}}      5
    5\,\mathrm{kg\cdot m^2}    5
    5 cm²                      5
    5\mathrm{x^2}              5x^2
    5\mathrm{e}                5e
    """
    # percent
    r"""
    62.5\%    62.5%
    62.5      62.5%
    10\%      10
    0.175     17.5\%
    """
    # text, choices and times
    r"""
    \text{Friday}        Friday
    Evelyn               \text{Evelyn}
    \textbf{ evelyn}     \text{Evelyn}
    C                    \text{(C)}
    \text{C}             \text{(C)}
    (C)                  \text{C}
    \text{(C) } 12       C
    (B) 5                \text{(B)}
    \text{C) }12         C
    C) 12                \text{(C)}
    (\mathrm{C})\ 12     C
    4:30 \text{ p.m.}    \text{4:30 p.m.}
    4:30\text{ PM}       \text{4:30 p.m.}
    11:21                V_{1}:V_{2}=11:21
    4 : 3                4:3
    \frac43              4:3
    3\!:\!4              3:4
    3\,:\,4              3:4
    """
    # bases
    r"""
    52_8        52_{8}
    52          52_8
    (1101)_2    1101_2
    1101_{2}    (1101)_{2}
    """
    # names before an answer, and equations as answers
    r"""
    x=5                    5
    5                      x=5
    2x+3                   y = 2x + 3
    n^2-n-1                m_{\max }=n^{2}-n-1
    x=\frac{10}{2}=5       5
    f(2)=5                 5
    -2x+4y=6               x-2y+3=0
    xy=1                   y=\frac1x
    5 = x                  5
    \frac12=f(3)           \frac12
    \approx 5              5
    x≈2.5                  2.5
    f'(x)=2x               2x
    n\equiv3\pmod 7        n \equiv 3 \pmod{7}
    n≡3 (\text{mod } 7)    n\equiv 3\pmod 7
    3\pmod 7               x\equiv 3\pmod 7
    x\equiv 3\pmod 7       3\pmod 7
    x\not=42               x\neq42
    f'(x)                  f^{\prime}(x)
    """
    # algebra
    r"""
    (a+5)(b+2)            ab+2a+5b+10
    \sec^2 y              \tan^2 y+1
    \frac{1}{\sqrt2+1}    \sqrt2-1
    x = 6 - 5i            6 - 5i
    \sin 60^\circ         \frac{\sqrt3}{2}
    \cos 20^{\circ}       \sin 70^\circ
    \frac{(2n)!}{n!^2}    \binom{2n}{n}
    \frac{1+i}{2}         \frac{1}{1-i}
    \dfrac 34             \tfrac{3}{4}
    \log_e 9              2\ln 3
    \log_{e}(x)           \ln x
    \mathrm{e}^2          e^2
    E^2+2E                E(E+2)
    \frac{2x}{2}          x
    x                     \frac{2x}{2}
    2n-n                  n
    """
    # lists, sets, tuples
    r"""
    100, 200                    100,200
    5,3,1                       1,3,5
    \{1,3,5\}                   1,3,5
    \{(1,2),(3,4)\}             (1,2),(3,4)
    3 \text{ or } 5             3,5
    x=1\text{ or }x=-2          1,-2
    \pm1,\pm7                   1,-1,7,-7
    69, 84                      $69$,$84$
    1\pm\sqrt{19}               1+\sqrt{19},1-\sqrt{19}
    \frac{1 \pm \sqrt{5}}{2}    \frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}
    (0,\pm2),(4,\pm23)          (0,2),(0,-2),(4,23),(4,-23)
    1,2,\ldots,10               1,2,\dots,10
    y=4, x=3                    (3,4)
    x=3, y=4                    (3,4)
    y=4\text{ and }x=3          x=3,y=4
    z=1,y=2,x=3                 (3,2,1)
    x=-2,x=1                    1,-2
    """
    # intervals and conditions
    r"""
    x<-5                             (-\infty,-5)
    \frac12\le x\le 8                [\frac12,8]
    -2\le x\le 7                     x\in[-2,7]
    x<2\text{ or }x>3                (-\infty,2)\cup(3,\infty)
    (3,\infty)\cup(-\infty,2)        (-\infty, 2) \cup (3, \infty)
    k\ge2                            k \geqslant 2
    \varnothing                      \emptyset
    \{x\mid x>3\}                    (3,\infty)
    \{x\in\mathbb{R} : 2\le x<3\}    [2,3)
    \{x|x>3\}                        x>3
    """
    # matrices
    r"""
    \begin{bmatrix}0.2\\[4pt]-3.6\end{bmatrix}    \begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}
    \langle 1,-2\rangle                           \begin{pmatrix} 1 \\ -2 \end{pmatrix}
    """
)

OTHER = (
    # looks
    r"""
    \bigl(4,3\bigr)                        (3,4)
    \bigl[3,4\bigr)                        [3,4]
    2\bigl(x+2\bigr)                       2x+2
    \lbrace 1,3\rbrace                     \{1,2\}
    \lbrace 1,2\rbrace                     (1,2)
    \text{The answer is } 8                7
    \text{The answer is not } 7            7
    \text{The answer is } -7               7
    \text{The answer is } 7\text{ or }8    7
    """
    # Unicode
    r"""
    2√3       23
    √12       12
    √(x+2)    \sqrt{x+1}
    ½         2
    7½        3.5
    ⅔         \frac32
    x²        2x
    x²        x
    x¹²       x^2
    10⁻³      1000
    5²        52
    """
    # powers of ten
    r"""
    1.5e3     15000
    1.5e-3    1500
    1.5e3     1.5
    2e-1      0.2
    1.5e      1.5
    """
    # plain numbers, compared digit for digit
    r"""
    -5                       5
    5                        -5
    6                        5
    50                       5
    1.5                      1
    3.000001                 3
    0.99999999999999999      1
    100000000000000000001    100000000000000000000
    """
    # a rounded decimal is not the number, except to twelve places
    r"""
    0.3333333    \frac13
    33.3         \frac{100}{3}
    1.414        \sqrt2
    3.14         \pi
    """
    # small constants: their difference is not nothing
    r"""
    \frac{1}{2^{99}}          \frac{1}{2^{100}}
    \frac{1}{100!}            \frac{1}{101!}
    6.7\times10^{-34}         6.6\times10^{-34}
    \frac{\sqrt2}{10^{20}}    \frac{\sqrt3}{10^{20}}
    10^{20}+1                 10^{20}
    2^{64}-1                  2^{64}
    """
    # periodic decimals
    r"""
    0.\overline{3}     0.3
    0.1\overline{6}    \frac{16}{99}
    0.\overline{3}4    \frac43
    0.\bar34           \frac{34}{99}
    """
    # thousands
    r"""
    1,001        1000
    1 000        1
    1,0          10
    1, 000, 5    10005
    """
    # mixed numbers, and numbers that only stand side by side
    r"""
    73/4        \frac{31}{4}
    7 3/4       \frac{21}{4}
    5\quad 6    11
    5 6         30
    5 6         5
    """
    # million and its like
    r"""
    5\text{ hundred}             5
    3\text{ million}             3
    3\text{ million}             3000
    5\text{ halves}              5
    12 dozen                     12
    \frac12\text{ million}       \frac12
    12 thousandths               12
    15\text{ dozens}             15
    15 dozens                    12
    4\text{ thousands}           4
    3 tenths                     30
    3\text{ hundred thousand}    300
    3\text{ eighths}             3
    3\text{ twelfths}            3
    2 lakh                       2
    2\text{ ten-thousandths}     2
    5\text{ doubled}             5
    """
    # units, degrees, ordinals
    r"""
    6\text{ cm}              5
    5\text{ perhaps six}     5
    5\text{ squared}         5
    5\text{ (probably)}      5
    31\degree                30
    \cos 60                  \cos 60\degree
    6\,\mathrm{m\,s^{-1}}    5
    5\mathrm{x^2}            5
    5\mathrm{n^2}            5
    5\mathrm{e}              5
    5²                       5
    """
    # a letter at the end is no unit
    r"""
    6       6m
    5       5t
    2\pi    2\pi h
    2n      2
    """
    # percent
    r"""
    6.25\%    62.5%
    17        17.5\%
    """
    # text, choices and times
    r"""
    2:15 \text{ p.m.}            4:30 \text{ p.m.}
    4:30 \text{ a.m.}            4:30 \text{ p.m.}
    2:15                         4:30
    4 \text{ a.m.}               4 \text{ p.m.}
    \text{Monday}                Friday
    \text{r}                     R
    \text{Evelina}               \text{Evelyn}
    \text{Nevely}                \text{Evelyn}
    D                            \text{(C)}
    (C) 12                       D
    (C), (D)                     C
    \text{D) }12                 C
    \text{C) or D)}              C
    \text{C) }12                 12
    \text{(C) or (D)}            \text{(C)}
    4:30 \text{ a.m.}            \text{4:30 p.m.}
    5:30 \text{ p.m.}            \text{4:30 p.m.}
    1:00                         12:00
    \text{the correct answer}    5
    x                            5
    4\!:\!3                      3:4
    3\!:\!4                      34
    """
    # bases
    r"""
    52_9         52_8
    42           52_8
    52_8         42
    52_8         52
    1112122_3    1112112_3
    (1101)_3     1101_2
    (1100)_2     1101_2
    """
    # names before an answer, and equations as answers
    r"""
    x=4                     5
    x=3                     x=4
    x=4                     y=4
    0                       x^2+1=0
    11a+c                   7=11a+c
    x-2y-3=0                x-2y+3=0
    x^2+2=0                 x^2+1=0
    6=5                     5
    x=4=5                   5
    1=2=5                   5
    x\ne5                   5
    x>5                     5
    5=x                     y=5
    0=x-5                   0
    5\approx 6              5
    n\equiv3\pmod 7         n\equiv 3\pmod 8
    5'                      5
    f'(x)                   f(x)
    y'+y=0                  y''+y=0
    x\equiv 4\pmod 7        x\equiv 3\pmod 7
    3\pmod 8                x\equiv 3\pmod 7
    3                       x\equiv 3\pmod 7
    x\not\equiv 3\pmod 7    x\equiv 3\pmod 7
    \not=42                 42
    x\not=42                42
    x\not= 42               x=42
    x\not\in[2,3]           [2,3]
    """
    # algebra
    r"""
    (a-5)(b+2)              ab+2a+5b+10
    \sqrt2+1                \sqrt2-1
    |x|                     x
    \binom{2n}{n+1}         \binom{2n}{n}
    z=5i                    z=1+2i
    x=\pm 5i                x=\pm 2i
    \cos 60                 \cos 60^\circ
    \frac{1\pm\sqrt7}{2}    \frac{1\pm\sqrt5}{2}
    \frac{1-i}{2}           \frac{1}{1-i}
    R-r                     0
    R+r                     2r
    3/5                     \frac34
    \log_e 8                \ln 9
    \log_2 9                \ln 9
    E                       e
    e                       E
    2E                      2e
    \ln E                   1
    \frac{2x}{3}            x
    \frac{2x}{2}            y
    \sqrt{x^2}              x
    -x                      x
    """
    # lists, sets, tuples
    r"""
    1,3                   1,3,5
    1,3,5,7               1,3,5
    1,3,6                 1,3,5
    16,3,1                16,3,1,1
    -2                    -2,-2
    5,6                   5
    (0,\pm2)              (0,2)
    (4,2)                 (2,4)
    (5,3)                 (4,2)
    (1,3),(2,4)           (1,2),(3,4)
    \{1,-2\}              (1,-2)
    (3,4)                 \{3,4\}
    1,5                   1,\ldots,5
    1,2,10                1,2,\dots,10
    y=3, x=4              (3,4)
    y=3\text{ and }x=4    (3,4)
    z=1,y=2,x=3           (1,2,3)
    y=3,x=4               x=3,y=4
    x=3, x=4              (3,4)
    """
    # intervals and conditions
    r"""
    x<2\text{ or }x\ge3           (-\infty,2)\cup(3,\infty)
    x\le-5                        (-\infty,-5)
    x>-5                          (-\infty,-5)
    [5,5]                         5
    \left[5,5\right]              5
    [3,4]                         [3,4)
    (3,4]                         [3,4]
    (0,1]                         [0,1)
    x<3                           x\le3
    \{x\mid x\ge3\}               (3,\infty)
    \{x\mid x>4\}                 (3,\infty)
    \{x\in\mathbb{Z}\mid x>3\}    (3,\infty)
    \{x\mid x>3\}                 3
    """
    # matrices
    r"""
    \begin{pmatrix}1&2\end{pmatrix}         \begin{pmatrix}1\\2\end{pmatrix}
    (2,1)                                   \begin{pmatrix}1\\2\end{pmatrix}
    (1,2)                                   \begin{pmatrix}1&2\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix}    \begin{pmatrix}1&3\\2&4\end{pmatrix}
    """
    # hedges
    r"""
    5 or 6                              5
    5\text{ or 6}                       5
    5\text{ or }6\text{ cm}             5
    5 \text{ (or maybe } 6\text{)}      5
    5\text{ hours }30\text{ minutes}    5
    5\text{ or more}                    5
    5\text{, not }6                     5
    5\pm1                               5
    [5,6]                               5
    6 \fbox{5}                          5
    \text{between }4\text{ and }6       5
    """
    # what is no number, and other scripts' digits
    r"""
    \infty           5
    \frac10          5
    \frac00          0
    \infty-\infty    0
    nan              5
    inf              5
    -\infty          \infty
    \frac10          \infty
    ٥                5
    ５                5
    ?                5
    {}               5
    """
    # code
    r"""
    __import__('os').system('true')    5
    eval('5')                          5
    print(5)                           5
    \operatorname{eval}(5)             5
    [5 for _ in (1,)][0]               5
    lambda: 5                          5
    """
)
LONG = [
    ("9" * 1500, "9" * 1499 + "8"),
    (r"0.\overline{" + "3" * 10**4 + "}", "0.3"),
]


@pytest.mark.parametrize("answer, gold", table(SAME))
def test_the_same_answer_in_another_spelling(answer, gold):
    """False negatives: an honest answer marked wrong."""
    assert compare(answer, gold) == "correct"


@pytest.mark.parametrize("answer, gold", table(OTHER) + LONG)
def test_another_answer(answer, gold):
    """False positives: a wrong answer, a hedge or a trick marked right."""
    assert compare(answer, gold) != "correct"


def test_a_pair_is_judged_once():
    """Parsing takes milliseconds, and rollouts of one problem repeat their answers."""
    compare.cache_clear()
    assert compare(r"\frac{37}{74}", "0.5") == compare(r"\frac{37}{74}", "0.5") == "correct"
    assert compare.cache_info().hits == 1
